"""Batches: the order of earlier versions, resumed at any step, complete evaluation, and damage named."""

import hashlib
import itertools
import re
from pathlib import Path

import next_tokens
import numpy as np
import pytest
from packs import batch_of, random_packs, write_packs
from tiny import CONFIG, MAX_SEQ_LENGTH, write_data

from bert_packed.core.settings import InputError
from bert_packed.data.batches import CheckedBatches
from bert_packed.data.input_pipeline import eval_batches, train_batches
from bert_packed.data.read_order import WHOLE, ProcessShard, index_files
from bert_packed.objectives.features import BATCH_NAMES, NEXT_TOKENS, NEXT_TOKENS_OF_ROWS, RECORDED
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.schema import MASKED_LM_WEIGHTS, PackSpec

SPEC = PackSpec(MAX_SEQ_LENGTH, 4, 12)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def evaluate(files, batch_size=4, spec=SPEC, config=CONFIG, features=RECORDED):
    return list(
        CheckedBatches(eval_batches(files, spec, batch_size, features), files, spec, config, features)
    )


@pytest.mark.parametrize("is_binary", [False, True])
@pytest.mark.parametrize("after", [b"", b"\x12\x00"], ids=["usual", "another form"])
def test_batches_hold_what_was_written(tmp_path, is_binary, after):
    packs = random_packs(np.random.default_rng(1), 5, MAX_SEQ_LENGTH)
    expected = batch_of(packs, MAX_SEQ_LENGTH, 4, 12)
    features = {name: expected[ours] for name, ours in BATCH_NAMES.items()}
    if is_binary:  # a part of the packs, as of files of both kinds
        weights, is_first = features[MASKED_LM_WEIGHTS], np.arange(5)[:, None] < 2
        assert weights[:2].max() > 1 and weights[2:].max() > 1
        features[MASKED_LM_WEIGHTS] = np.where(is_first, np.minimum(weights, 1), weights)
    path = str(tmp_path / "packed.tfrecord")
    tfrecords.write_records(path, [record + after for record in serialize_examples(features)])
    (batch,) = evaluate([path], 5)
    assert max(len(pack) for pack in packs) > 1
    assert batch.keys() == expected.keys() == set(BATCH_NAMES.values())
    for name, values in expected.items():
        assert batch[name].dtype == values.dtype, name
        np.testing.assert_array_equal(batch[name], values, err_msg=name)


# 0.1.0 read these packs of 50 steps by `tf.data`: a run that began then continues with the same batches
PINNED = {
    (3, 5, 0, None): "9f8f3fb1d023572b",
    (4, 5, 0, None): "82586b28e0db9f5c",
    (3, 1, 0, None): "e5c30f95e4c6520e",
    (3, 1000, 7, None): "abda127d923a4272",
    (3, 7, 11, 0): "73760bae772bbbe6",
    (3, 7, 11, 1): "c2907a9c4dbf0ac4",
}


@pytest.mark.parametrize(("seed", "shuffle", "first_step", "process"), PINNED)
def test_order_is_that_of_earlier_versions(files, seed, shuffle, first_step, process):
    shard = WHOLE if process is None else ProcessShard(4, process, 2)
    index = index_files(files)
    packed = train_batches(index, SPEC, 4, seed, shuffle, first_step, shard=shard)
    batches = CheckedBatches(packed, files, SPEC, CONFIG)
    packs = [batches.packs(index).tolist() for _ in itertools.islice(batches, 50)]
    assert hashlib.sha256(str(packs).encode()).hexdigest()[:16] == PINNED[seed, shuffle, first_step, process]


@pytest.mark.parametrize(
    ("feature", "value", "name", "limit"),
    [
        ("token_ids", 31, "input_ids", "vocab_size=31"),
        ("token_ids", -1, "input_ids", "vocab_size=31"),
        ("prediction_ids", 99, "masked_lm_ids", "vocab_size=31"),
        ("position_ids", 24, "position_ids", "max_position_embeddings=24"),
        ("sequence_ids", 5, "input_mask", "max_sequences_per_pack + 1=5"),
        ("token_type_ids", 2, "segment_ids", "type_vocab_size=2"),
        ("prediction_positions", 24, "masked_lm_positions", "max_seq_length=24"),
        ("prediction_sequences", 5, "masked_lm_weights", "max_sequences_per_pack + 1=5"),
        ("nsp_labels", 2, "next_sentence_labels", "the number of classes=2"),
        ("cls_positions", 24, "next_sentence_positions", "max_seq_length=24"),
    ],
)
def test_ids_without_a_row_name_file_and_record(feature, value, name, limit):
    batch = batch_of(random_packs(np.random.default_rng(1), 5, MAX_SEQ_LENGTH), MAX_SEQ_LENGTH, 4, 12)
    batch[feature][3, 0] = value
    # Batches are made here, as our files are not written with negative numbers
    read = [(batch, (np.zeros(5, np.int64), np.arange(1, 6)))]
    message = f"x, record 4: every value of {name} must be from 0 and below {limit}. Received: {value}"
    with pytest.raises(InputError, match=re.escape(message)):
        next(CheckedBatches(read, ["x"], SPEC, CONFIG))


@pytest.mark.parametrize(
    ("feature", "value", "message"),
    [
        ("token_ids", 31, "every value of input_ids must be from 0 and below vocab_size=31"),
        ("label_ids", 31, "every value of label_ids must be from 0 and below vocab_size=31"),
        ("sequence_ids", 5, r"every value of input_mask must be .* below max_sequences_per_pack \+ 1=5"),
        ("label_sequences", 5, r"every value of label_mask must be from 0 and below max_sequences_per_pack"),
        ("position_ids", 3, "position_ids must begin at 0"),
    ],
)
def test_records_for_next_tokens_name_theirs(tmp_path, feature, value, message):
    """Only rows may go on from the pack before: there a position is of the whole sequence."""
    batch = next_tokens.batch_of(next_tokens.random_packs(), 12, 4)
    batch[feature][3, 0] = value
    path, spec = str(tmp_path / "packed.tfrecord"), PackSpec(12, 4, 0)
    next_tokens.write_packs(path, batch)
    with pytest.raises(InputError, match=f"^{path}, record 4: {message}"):
        evaluate([path], 5, spec, next_tokens.CONFIG, NEXT_TOKENS)
    if feature == "position_ids":
        (found,) = evaluate([path], 5, spec, next_tokens.CONFIG, NEXT_TOKENS_OF_ROWS)
        assert found[feature][3, 0] == value


def flip(path, _):
    content = bytearray(Path(path).read_bytes())
    content[-50] ^= 1
    Path(path).write_bytes(content)


def cut(path, index):
    with open(path, "r+b") as file:
        file.truncate(index.offsets[1][-2])


def write_others(path, _):
    write_packs(path, random_packs(np.random.default_rng(1), 6, 16), 16)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, r", record 6: the record is truncated or corrupt"),
        (cut, r" must stay as it is while it is read\. Received: a shorter file"),
        (write_others, r", record \d: .* must have length 24, as in .* Received: 16"),
    ],
)
@pytest.mark.parametrize("way", ["training", "evaluation", "evaluation of several"])
def test_damage_names_file_and_record(tmp_path, damage, message, way):
    files = write_data(tmp_path)
    index = index_files(files)
    damage(files[1], index)
    if damage is cut and way == "evaluation":  # without an index nobody knows how long it was
        assert len(evaluate(files)) == 4
        return
    if damage is write_others:
        index = index_files(files)
    shard = ProcessShard(4, 1, 2)
    packed = {
        "training": lambda: train_batches(index, SPEC, 4, 3, 5),
        "evaluation": lambda: eval_batches(files, SPEC, 4),
        "evaluation of several": lambda: eval_batches(files, SPEC, 4, shard=shard, index=index),
    }[way]()
    with pytest.raises(InputError, match=f"^{files[1]}{message}"):
        list(itertools.islice(CheckedBatches(packed, files, SPEC, CONFIG), 8))
