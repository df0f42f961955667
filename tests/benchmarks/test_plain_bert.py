"""The baseline of packing's overhead computes what our model computes for single sequences."""

import numpy as np
from packs import batch_of, random_sequence
from tiny import CONFIG, make_engine

from benchmarks import plain_bert
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.training.engines.variables import named_weights

MAX_SEQ_LENGTH = 24
PLAIN_NAMES = {
    "embeddings": "bert/embeddings",
    "layer": "bert/layer",
    "pooler": "next_sentence/pooler",
    "classifier": "next_sentence/classifier",
}


def our_path(plain_path):
    for plain, ours in PLAIN_NAMES.items():
        if plain_path.startswith(plain):
            return ours + plain_path.removeprefix(plain)
    return plain_path


def test_plain_bert_is_our_bert_on_single_sequences():
    rng = np.random.default_rng(0)
    rows = [[random_sequence(rng, length)] for length in (MAX_SEQ_LENGTH, 9, 17)]
    batch = batch_of(rows, MAX_SEQ_LENGTH, num_slots=1, num_predictions=8)
    weights = make_engine().model
    plain = plain_bert.PlainBert(CONFIG)
    plain.build()
    ours = named_weights(weights)
    theirs = {our_path(name): weight for name, weight in named_weights(plain).items()}
    assert theirs.keys() == ours.keys()
    for name, weight in theirs.items():
        weight.assign(ours[name])
    outputs, expected = plain(batch), weights(batch)
    np.testing.assert_allclose(outputs["nsp_logits"], expected["nsp_logits"][:, 0], atol=1e-5)
    used = batch["prediction_sequences"] > 0
    got, want = np.asarray(outputs["mlm_logits"])[used], np.asarray(expected["mlm_logits"])[used]
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    theirs, ours = plain_bert.plain_objective(), pretraining_objective("per_token")
    got, want = theirs.sums(outputs, batch), ours.sums(expected, batch)
    assert set(theirs.sum_names) == set(got) and theirs.losses == ours.losses
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, err_msg=name)
