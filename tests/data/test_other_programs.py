"""Packs in programs of others: by `tf.data`, and by the rules of TensorFlow Model Garden.

Those are here as tensorflow/models has them: `BertPretrainDataLoader`, `PackedSequenceMask` of official/nlp.
"""

import dataclasses
import os

import numpy as np
import pytest
from documented_commands import PAGES, blocks
from tiny import CONFIG
from unpacked_records import make_features, write_features

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.data.batches import CheckedBatches
from bert_packed.data.input_pipeline import eval_batches
from bert_packed.objectives.features import BATCH_NAMES
from bert_packed.records import record_rules
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.verify_tfrecords import VerifyConfig
from data_gen.verify_tfrecords import main as verify

S, P, CLS = 24, 16, 90


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """The same packs with weights of both kinds: path and manifest of each."""
    folder = tmp_path_factory.mktemp("packs")
    features = make_features(np.random.default_rng(1).integers(3, 13, 60), S)
    features[schema.INPUT_IDS][features[schema.INPUT_IDS] == CLS] += 1
    features[schema.INPUT_IDS][:, 0] = CLS
    source = write_features(folder / "in.tfrecord", features)
    found = {}
    for kind in schema.MASKED_LM_WEIGHTS_KINDS:
        sizes = {"max_seq_length": S, "max_predictions_per_pack": P, "num_shards": 1}
        config = PackConfig(source, str(folder / kind), masked_lm_weights=kind, **sizes)
        found[kind] = str(folder / kind / "packed-00000-of-00001.tfrecord"), pack(config), source
    return found


def read_by_the_page(path, batch_size=1000):
    """Batches of `tf.data`, read by the lines of docs/guides/other_programs.md."""
    page = blocks(PAGES["docs/guides/other_programs.md"])
    (text,) = (block.text for block in page if "by_length" in block.text)
    folder = os.path.dirname(path)
    text = text.replace("my/garden", folder).replace("batch(8)", f"batch({batch_size})")
    names = {}
    exec(text, names)
    return list(names["batches"].as_numpy_iterator())


def read_as_model_garden(path):
    """`BertPretrainDataLoader` with `use_position_id` and without `use_next_sentence_label`."""
    (batch,) = read_by_the_page(path)
    return {name: values for name, values in batch.items() if not name.startswith("next_sentence")}


def test_the_lines_of_the_page_read_our_batches(packs):
    path, *_ = packs["sequence"]
    spec, large = record_rules.read_pack_spec([path]), dataclasses.replace(CONFIG, vocab_size=1000)
    ours = list(CheckedBatches(eval_batches([path], spec, 4), [path], spec, large))
    theirs = read_by_the_page(path, 4)
    assert len(ours) == len(theirs) > 1
    for one, other in zip(ours, theirs, strict=True):
        assert other.keys() == set(schema.PACKED_LENGTHS)
        for name, values in other.items():
            found = one[BATCH_NAMES[name]]
            np.testing.assert_array_equal(found[: len(values)], values, err_msg=name)


def test_its_loss_weighs_every_prediction_alike(packs):
    binary, ours = (read_as_model_garden(packs[kind][0]) for kind in ("binary", "sequence"))
    assert ours["masked_lm_weights"].max() > 1
    assert set(np.unique(binary["masked_lm_weights"])) == {0, 1}
    np.testing.assert_array_equal(binary["masked_lm_weights"] > 0, ours["masked_lm_weights"] > 0)
    for name, values in ours.items():
        if name != "masked_lm_weights":
            np.testing.assert_array_equal(binary[name], values, err_msg=name)


def test_its_mask_is_of_each_sequence_alone(packs):
    """Its sequences begin where the first token of the row comes again; padding is what `input_mask` says."""
    batch = read_as_model_garden(packs["binary"][0])
    tokens, sequences = batch["input_ids"], batch["input_mask"]
    numbers = np.cumsum(tokens == tokens[:, :1], axis=1)
    is_token = np.minimum(sequences, 1)
    theirs = (numbers[:, :, None] == numbers[:, None, :]) * is_token[:, None, :]
    same = (sequences[:, :, None] == sequences[:, None, :]) * is_token[:, None, :]
    np.testing.assert_array_equal(theirs[sequences > 0], same[sequences > 0])
    assert sequences.max() > 1
    # Positions that it counts by itself are those of the records, too
    np.testing.assert_array_equal(
        (np.cumsum(theirs, axis=2).diagonal(axis1=1, axis2=2) - 1)[sequences > 0],
        batch["position_ids"][sequences > 0],
    )


def test_our_own_readers_find_the_sequences_in_both(packs):
    batches, large = [], dataclasses.replace(CONFIG, vocab_size=1000)
    for kind in ("binary", "sequence"):
        path, manifest, source = packs[kind]
        assert manifest["settings"]["masked_lm_weights"] == kind
        assert verify(VerifyConfig(input_file=source, packed_file=path)) == 0
        spec = record_rules.read_pack_spec([path])
        batches += CheckedBatches(eval_batches([path], spec, 100), [path], spec, large)
    for name, values in batches[1].items():
        np.testing.assert_array_equal(batches[0][name], values, err_msg=name)


def test_an_unknown_kind_of_weights_is_refused():
    with pytest.raises(InputError, match=r"must be one of sequence, binary\. Received: 'both'\."):
        PackConfig("x", "y", masked_lm_weights="both")
