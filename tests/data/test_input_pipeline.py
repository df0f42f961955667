"""Batches: every pack once an epoch, resumable at any step, complete evaluation, damage named."""

import types
from pathlib import Path

import next_tokens
import numpy as np
import pytest
import tensorflow as tf
from packs import batch_of, random_packs, write_packs
from tiny import CONFIG, MAX_SEQ_LENGTH, write_data

from bert_packed.core.settings import InputError
from bert_packed.data.batches import CheckedBatches
from bert_packed.data.input_pipeline import eval_batches, train_batches
from bert_packed.data.read_order import index_files
from bert_packed.objectives.features import BATCH_NAMES, NEXT_TOKENS, NEXT_TOKENS_OF_ROWS
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.schema import MASKED_LM_WEIGHTS, PackSpec

SPEC = PackSpec(MAX_SEQ_LENGTH, 4, 12)
NUM_PACKS = 15


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def take(files, num_batches, batch_size=4, first_step=0, seed=3, shuffle=5):
    dataset = train_batches(index_files(files), SPEC, batch_size, seed, shuffle, first_step)
    return list(CheckedBatches(dataset.take(num_batches), files, SPEC, CONFIG))


def rows(batches, name="token_ids"):
    return [tuple(row) for batch in batches for row in batch[name].tolist()]


@pytest.mark.parametrize("weights", ["of each sequence", "of 1 for other programs"])
def test_batches_hold_what_was_written(tmp_path, weights):
    packs = random_packs(np.random.default_rng(1), 5, MAX_SEQ_LENGTH)
    expected = batch_of(packs, MAX_SEQ_LENGTH, 4, 12)
    features = {name: expected[ours] for name, ours in BATCH_NAMES.items()}
    if weights == "of 1 for other programs":
        assert features[MASKED_LM_WEIGHTS].max() > 1
        features[MASKED_LM_WEIGHTS] = np.minimum(features[MASKED_LM_WEIGHTS], 1)
    path = str(tmp_path / "packed.tfrecord")
    tfrecords.write_records(path, serialize_examples(features))
    (batch,) = CheckedBatches(eval_batches([path], SPEC, 5), [path], SPEC, CONFIG)
    assert max(len(pack) for pack in packs) > 1
    assert batch.keys() == expected.keys() == set(BATCH_NAMES.values())
    for name, values in expected.items():
        assert batch[name].dtype == values.dtype, name
        np.testing.assert_array_equal(batch[name], values, err_msg=name)


def test_order_follows_from_the_seed(files):
    assert rows(take(files, 8)) == rows(take(files, 8))
    assert rows(take(files, 8)) != rows(take(files, 8, seed=4))
    # TensorFlow's global seed has no say
    tf.random.set_seed(99)
    before = rows(take(files, 8))
    tf.random.set_seed(98)
    assert rows(take(files, 8)) == before
    first, second = rows(take(files, 8, batch_size=15))[:15], rows(take(files, 8, batch_size=15))[15:30]
    assert first != second and sorted(first) == sorted(second)


@pytest.mark.parametrize("first_step", [1, 3, 4, 10])
def test_resumed_batches_are_the_next_ones(files, first_step):
    assert rows(take(files, 5, first_step=first_step)) == rows(take(files, first_step + 5))[first_step * 4 :]


def test_evaluation_drops_nothing_and_fills_with_empty_packs(files):
    batches = list(CheckedBatches(eval_batches(files, SPEC, 4), files, SPEC, CONFIG))
    assert [len(batch["token_ids"]) for batch in batches] == [4, 4, 4, 4]
    found = rows(batches)
    assert len(set(found[:NUM_PACKS])) == NUM_PACKS
    last = {name: values[-1] for name, values in batches[-1].items()}
    assert all(not values.any() for values in last.values())


def test_static_shapes(files):
    for dataset in (train_batches(index_files(files), SPEC, 4, 0, 5), eval_batches(files, SPEC, 4)):
        batch, _ = dataset.element_spec
        assert all(tensor.shape.is_fully_defined() and tensor.shape[0] == 4 for tensor in batch.values())


@pytest.mark.parametrize(
    ("feature", "value", "message"),
    [
        ("token_ids", 31, "input_ids must be from 0 and below vocab_size=31. Received: 31"),
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
def test_ids_without_a_row_name_file_and_record(tmp_path, monkeypatch, feature, value, message):
    path = str(tmp_path / "packed.tfrecord")
    batch = batch_of(random_packs(np.random.default_rng(1), 5, MAX_SEQ_LENGTH), MAX_SEQ_LENGTH, 4, 12)
    batch[feature][3, 0] = value
    monkeypatch.setattr("packs.batch_of", lambda *_: batch)
    write_packs(path, [], MAX_SEQ_LENGTH)
    with pytest.raises(InputError, match=message) as caught:
        list(CheckedBatches(eval_batches([path], SPEC, 2), [path], SPEC, CONFIG))
    assert str(caught.value).startswith(f"{path}, record 4: ")


def test_ids_below_0_are_named_too():
    """In others' files: ours are not written with any."""
    batch = batch_of(random_packs(np.random.default_rng(1), 5, MAX_SEQ_LENGTH), MAX_SEQ_LENGTH, 4, 12)
    batch["token_ids"][3, 0] = -1
    read = [(batch, (np.zeros(5, np.int64), np.arange(1, 6)))]
    dataset = types.SimpleNamespace(as_numpy_iterator=lambda: iter(read))
    with pytest.raises(InputError, match=r"x, record 4: every value of input_ids .* Received: -1"):
        next(CheckedBatches(dataset, ["x"], SPEC, CONFIG))


@pytest.mark.parametrize(
    ("feature", "value", "message"),
    [
        ("token_ids", 31, "every value of input_ids must be from 0 and below vocab_size=31"),
        ("label_ids", 31, "every value of label_ids must be from 0 and below vocab_size=31"),
        (
            "sequence_ids",
            5,
            r"every value of input_mask must be from 0 and below max_sequences_per_pack \+ 1=5",
        ),
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

    def read(features):
        batches = eval_batches([path], spec, 5, features)
        return list(CheckedBatches(batches, [path], spec, next_tokens.CONFIG, features))

    with pytest.raises(InputError, match=message) as caught:
        read(NEXT_TOKENS)
    assert str(caught.value).startswith(f"{path}, record 4: ")
    if feature == "position_ids":
        assert read(NEXT_TOKENS_OF_ROWS)[0][feature][3, 0] == value


def test_corrupt_record_is_named(tmp_path):
    files = write_data(tmp_path)
    content = bytearray(Path(files[1]).read_bytes())
    content[len(content) // 2] ^= 1
    Path(files[1]).write_bytes(content)
    with pytest.raises(InputError, match="corrupt") as caught:
        list(CheckedBatches(eval_batches(files, SPEC, 4), files, SPEC, CONFIG))
    assert files[1] in str(caught.value) and "record" in str(caught.value)


def test_records_of_another_shape_are_named(tmp_path):
    files = write_data(tmp_path)
    write_packs(files[1], random_packs(np.random.default_rng(1), 3, 16), 16)
    with pytest.raises(InputError, match="must have length 24") as caught:
        list(CheckedBatches(eval_batches(files, SPEC, 4), files, SPEC, CONFIG))
    assert files[1] in str(caught.value)
