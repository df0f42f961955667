"""Batches: the order of earlier versions, resumed at any step, complete evaluation, and damage named."""

import hashlib
import itertools
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
NUM_PACKS = 15
SHAPES = {feature.name: (4, SPEC.size(feature.length)) for feature in RECORDED}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def take(files, num_batches, batch_size=4, first_step=0, seed=3, shuffle=5, shard=WHOLE):
    """The packs of some batches: list of lists of their numbers."""
    index = index_files(files)
    packed = train_batches(index, SPEC, batch_size, seed, shuffle, first_step, shard=shard)
    batches = CheckedBatches(packed, files, SPEC, CONFIG)
    return [batches.packs(index).tolist() for _ in itertools.islice(batches, num_batches)]


def evaluate(files, batch_size=4, spec=SPEC, config=CONFIG, features=RECORDED):
    return list(
        CheckedBatches(eval_batches(files, spec, batch_size, features), files, spec, config, features)
    )


@pytest.mark.parametrize("weights", ["of each sequence", "of 1 for other programs"])
@pytest.mark.parametrize("after", [b"", b"\x12\x00"], ids=["usual", "another form"])
def test_batches_hold_what_was_written(tmp_path, weights, after):
    packs = random_packs(np.random.default_rng(1), 5, MAX_SEQ_LENGTH)
    expected = batch_of(packs, MAX_SEQ_LENGTH, 4, 12)
    features = {name: expected[ours] for name, ours in BATCH_NAMES.items()}
    if weights == "of 1 for other programs":
        assert features[MASKED_LM_WEIGHTS].max() > 1
        features[MASKED_LM_WEIGHTS] = np.minimum(features[MASKED_LM_WEIGHTS], 1)
    path = str(tmp_path / "packed.tfrecord")
    tfrecords.write_records(path, [record + after for record in serialize_examples(features)])
    (batch,) = evaluate([path], 5)
    assert max(len(pack) for pack in packs) > 1
    assert batch.keys() == expected.keys() == set(BATCH_NAMES.values())
    for name, values in expected.items():
        assert batch[name].dtype == values.dtype, name
        np.testing.assert_array_equal(batch[name], values, err_msg=name)


# Packs of 50 steps, as 0.1.0 read them by `tf.data`: a run that began then continues with the same batches
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
    packs = take(files, 50, 4, first_step, seed, shuffle, shard)
    assert hashlib.sha256(str(packs).encode()).hexdigest()[:16] == PINNED[seed, shuffle, first_step, process]


def test_an_epoch_has_each_pack_once(files):
    first, second = take(files, 2, batch_size=NUM_PACKS)
    assert first != second and sorted(first) == sorted(second) == list(range(NUM_PACKS))
    assert first[:12] == [pack for packs in take(files, 3) for pack in packs]
    assert first != take(files, 1, batch_size=NUM_PACKS, seed=4)[0]


@pytest.mark.parametrize("first_step", [1, 3, 4, 10])
def test_resumed_batches_are_the_next_ones(files, first_step):
    assert take(files, 5, first_step=first_step) == take(files, first_step + 5)[first_step:]


def test_evaluation_drops_nothing_and_fills_up(files):
    batches = evaluate(files)
    tokens = np.concatenate([batch["token_ids"] for batch in batches])
    assert len(batches) == 4 and len(np.unique(tokens[:NUM_PACKS], axis=0)) == NUM_PACKS
    assert not any(values[-1].any() for values in batches[-1].values())
    for batch in (*batches, *(batch for batch, _ in itertools.islice(train(files), 5))):
        assert {name: values.shape for name, values in batch.items()} == SHAPES


def train(files):
    return train_batches(index_files(files), SPEC, 4, 0, 5)


def wrong_batch(feature, value):
    batch = batch_of(random_packs(np.random.default_rng(1), 5, MAX_SEQ_LENGTH), MAX_SEQ_LENGTH, 4, 12)
    batch[feature][3, 0] = value
    return batch


@pytest.mark.parametrize(
    ("feature", "value", "message"),
    [
        ("token_ids", 31, "input_ids must be from 0 and below vocab_size=31. Received: 31"),
        ("token_ids", -1, "input_ids must be from 0 and below vocab_size=31. Received: -1"),
        ("prediction_ids", 99, "masked_lm_ids must be from 0 and below vocab_size=31. Received: 99"),
        (
            "position_ids",
            24,
            "position_ids must be from 0 and below max_position_embeddings=24. Received: 24",
        ),
        (
            "sequence_ids",
            5,
            r"input_mask must be from 0 and below max_sequences_per_pack \+ 1=5. Received: 5",
        ),
        ("token_type_ids", 2, "segment_ids must be from 0 and below type_vocab_size=2. Received: 2"),
        ("prediction_positions", 24, "masked_lm_positions must be from 0 and below max_seq_length=24"),
        ("prediction_sequences", 5, "masked_lm_weights must be from 0 and below max_sequences_per_pack"),
        ("nsp_labels", 2, "next_sentence_labels must be from 0 and below the number of classes=2"),
        ("cls_positions", 24, "next_sentence_positions must be from 0 and below max_seq_length=24"),
    ],
)
def test_ids_without_a_row_name_file_and_record(feature, value, message):
    # Not from a file: ours are not written with negative numbers
    read = [(wrong_batch(feature, value), (np.zeros(5, np.int64), np.arange(1, 6)))]
    with pytest.raises(InputError, match=f"x, record 4: every value of {message}"):
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
