"""Masked LM without next sentences: packing is invisible to it, and its weights go out and come back."""

import numpy as np
import pytest
from exports import assert_close
from packs import packed_and_unpacked
from tiny import CONFIG, to_floats

from bert_packed.checkpoints import checkpoint
from bert_packed.config import MASKED_LM
from bert_packed.evaluation.inference import encode, load_encoder
from bert_packed.models.packed_model import build_model
from bert_packed.objectives.pretraining import masked_lm_objective, pretraining_objective
from bert_packed.text.tokenization import SPECIAL_TOKENS, Vocabulary, save_vocab
from bert_packed.training import engines
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends


def make_engine(objective=None):
    objective = objective or masked_lm_objective("per_sequence")
    return engines.make_engine(objective.build_model(CONFIG, 1), objective)


def gradients(engine, batch):
    found, sums = engine.gradients(batch)
    names = [variable.path.partition("/")[2] for variable in engine.model.trainable_variables]
    return dict(zip(names, map(np.asarray, found), strict=True)), to_floats(sums)


def assert_equal(got, want):
    for name, values in want.items():
        if name.endswith("key/bias"):  # which moves no softmax
            assert np.abs(got[name]).max() <= 1e-6
            continue
        scale = np.abs(values).max()
        assert scale > 1e-4, f"{name} has no gradient: the comparison would be empty"
        assert np.abs(got[name] - values).max() <= 1e-5 * scale, name


def test_packed_equals_unpacked():
    engine = make_engine()
    packed, unpacked = packed_and_unpacked()
    assert packed["sequence_ids"].max(axis=1).tolist() == [4, 3, 1, 2, 1]
    # what the model is not told of, it does not read
    read = [feature.name for feature in engine.objective.features]
    assert "nsp_labels" not in read and "cls_positions" not in read
    packed, unpacked = ({name: batch[name] for name in read} for batch in (packed, unpacked))
    (got, got_sums), (want, want_sums) = gradients(engine, packed), gradients(engine, unpacked)
    assert got_sums == pytest.approx(want_sums, rel=1e-5) and got_sums["num_sequences"] == 11
    assert_equal(got, want)


def test_it_learns_what_both_heads_together_learn_of_masked_tokens():
    """The gradients of the ablation without next-sentence loss, of the weights that both models have."""
    batch, _ = packed_and_unpacked()
    engines_of_both = make_engine(), make_engine(pretraining_objective("per_sequence", False))
    for name, weight in engines_of_both[0].weights().items():
        weight.assign(engines_of_both[1].weights()[name])
    (alone, sums), (both, both_sums) = (gradients(engine, batch) for engine in engines_of_both)
    assert both.keys() - alone.keys() == {
        f"next_sentence/{part}/{kind}" for part in ("pooler", "classifier") for kind in ("kernel", "bias")
    }
    assert_equal(alone, {name: both[name] for name in alone})
    assert sums.keys() < both_sums.keys()
    assert sums == pytest.approx({name: both_sums[name] for name in sums}, rel=1e-5)


def test_vectors_of_texts_need_no_next_sentence_head(tmp_path):
    model = build_model(MASKED_LM, CONFIG, seed=1)
    checkpoint.save_weights(tmp_path, named_weights(model), CONFIG)
    words = [f"w{number}" for number in range(CONFIG.vocab_size - len(SPECIAL_TOKENS))]
    save_vocab(Vocabulary((*SPECIAL_TOKENS, *words)), tmp_path / "vocab.txt")
    encoder = load_encoder(str(tmp_path), str(tmp_path / "vocab.txt"))
    (found,) = encode(encoder, ["w1 w2 w3"], pooling="cls")
    token_ids = np.array([[2, 6, 7, 8, 3]], np.int32)
    batch = {
        "token_ids": token_ids,
        "sequence_ids": np.ones_like(token_ids),
        "token_type_ids": np.zeros_like(token_ids),
        "position_ids": np.arange(5, dtype=np.int32)[None],
    }
    assert_close(found, np.asarray(model.encode(batch))[0, 0])
