"""Online packs: every sequence once, little kept in memory, predictions never over P; the tf.data stage."""

import collections
import itertools

import numpy as np
import pytest
from unpacked_records import list_packed, list_unpacked, load, make_features, write_features

from bert_packed.assembly.online_assembly import assemble_stream, packs_of_stream, split_by_predictions
from bert_packed.core.settings import InputError
from bert_packed.data.input_pipeline import online_batches
from bert_packed.objectives.features import BATCH_NAMES
from bert_packed.packing.online import OnlinePacker
from bert_packed.records.sequences import take
from bert_packed.schema import PackSpec

S = 24
SPEC = PackSpec(S, 4, 6)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """A file of sixty sequences, and what it holds."""
    lengths = np.random.default_rng(0).integers(2, S + 1, 60)
    features = make_features(lengths, S)
    return write_features(tmp_path_factory.mktemp("records") / "u.tfrecord", features), features


def collect(blocks):
    blocks = list(blocks)
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


@pytest.mark.parametrize("at_a_time", [1, 7, 60])
def test_every_sequence_once(records, at_a_time):
    path, features = records
    sequences = load(path)
    parts = [take(sequences, np.arange(i, min(i + at_a_time, 60))) for i in range(0, 60, at_a_time)]
    packs = collect(assemble_stream(parts, OnlinePacker(S, 4, buffer_size=16), SPEC))
    assert packs["input_mask"].max() > 1
    assert collections.Counter(list_packed(packs)) == collections.Counter(list_unpacked(features))
    assert (packs["masked_lm_weights"] > 0).sum(axis=1).max() <= SPEC.max_predictions_per_pack
    # The buffer is held, and the part that was read at once
    stream = packs_of_stream(parts, OnlinePacker(S, 4, buffer_size=16))
    assert all(len(held) < 16 + at_a_time for held, _ in stream)


def test_split_by_predictions():
    sizes = split_by_predictions(np.array([5, 4, 3, 2]), np.array([3, 1]), 9)
    assert sizes.tolist() == [2, 1, 1]
    assert split_by_predictions(np.array([5, 4, 3, 2]), np.array([3, 1]), 12).tolist() == [3, 1]
    assert split_by_predictions(np.array([0, 9, 0, 9]), np.array([4]), 9).tolist() == [3, 1]
    # a pack is split by its own predictions, also where packs of several go before it
    sizes = split_by_predictions(np.array([4, 4, 9, 1, 1, 2]), np.array([2, 3, 1]), 9)
    assert sizes.tolist() == [2, 1, 2, 1]


def test_a_resumed_packer_needs_what_waits_in_it(records):
    path, _ = records
    sequences = load(path)
    parts = [take(sequences, np.arange(i, i + 10)) for i in range(0, 60, 10)]
    whole = collect(assemble_stream(parts, OnlinePacker(S, 4, buffer_size=16), SPEC))
    packer = OnlinePacker(S, 4, buffer_size=16)
    stream = assemble_stream(parts, packer, SPEC)
    first = [next(stream), next(stream)]
    state, at = packer.state(), packer.num_arrived
    packer = OnlinePacker.from_state(state)
    with pytest.raises(ValueError, match=r"must be the sequences that wait in the packer, \d+ here\. .* 0"):
        next(assemble_stream(parts[at // 10 :], packer, SPEC))
    waiting = take(sequences, packer.waiting)
    rest = list(assemble_stream(parts[at // 10 :], packer, SPEC, waiting))
    for name, values in collect([*first, *rest]).items():
        np.testing.assert_array_equal(values, whole[name])


@pytest.mark.parametrize(
    ("spec", "column", "what"),
    [
        (PackSpec(8, 4, 6), "lengths", "max_seq_length=8 tokens"),
        (PackSpec(S, 4, 3), "num_predictions", "max_predictions_per_pack=3 predictions"),
    ],
)
def test_a_sequence_over_the_pack_is_named(records, spec, column, what):
    """The first of several is named, by what it has too much of."""
    path, _ = records
    sequences, limit = load(path), int(what.split("=")[1].split()[0])
    sequences = take(sequences, np.argsort(sequences[column]))
    assert sequences[column][0] <= limit
    index = int(np.argmax(sequences[column] > limit))
    record, received = sequences["record_numbers"][index], sequences[column][index]
    message = rf"u\.tfrecord, record {record}: .* at most {what}\. Received: {received}"
    with pytest.raises(InputError, match=message):
        list(assemble_stream([sequences], OnlinePacker(spec.max_seq_length, 4, buffer_size=16), spec))


def test_stage_has_static_shapes_and_loses_nothing(records):
    path, features = records
    made = list(online_batches([path], SPEC, batch_size=7, num_epochs=2, buffer_size=16))
    shapes = {ours: (7, *SPEC.shape(name)) for name, ours in BATCH_NAMES.items()}
    for batch in made:
        assert {name: values.shape for name, values in batch.items()} == shapes
        assert {str(values.dtype) for values in batch.values()} == {"int32", "float32"}
    batches = [{name: batch[ours] for name, ours in BATCH_NAMES.items()} for batch in made]
    expected = collections.Counter(list_unpacked(features))
    found = collections.Counter(list_packed(collect(batches)))
    assert found == expected + expected


def test_stage_refuses_at_once_what_it_cannot_do(records):
    path, _ = records
    with pytest.raises(ValueError, match="`files` must name at least one file"):
        online_batches([], SPEC, batch_size=5)
    with pytest.raises(ValueError, match="`max_age` must be at least buffer_size=16"):
        online_batches([path], SPEC, batch_size=5, buffer_size=16, max_age=3)


def test_endless_stage_is_the_same_again(records):
    path, _ = records
    first, again = (
        itertools.islice(online_batches([path], SPEC, batch_size=5, buffer_size=16), 12) for _ in "ab"
    )
    for one, other in zip(first, again, strict=True):
        for name, values in one.items():
            np.testing.assert_array_equal(values, other[name])
