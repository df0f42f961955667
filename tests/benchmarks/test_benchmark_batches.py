"""What the benchmarks of training run on: the same sequences packed and not, counted from the records."""

import numpy as np
import pytest
import tensorflow as tf
from tiny import CONFIG

from benchmarks.benchmark_batches import draw_wikipedia_lengths, make_batches
from benchmarks.synthetic_data import draw_lengths, write_sequences
from bert_packed import schema
from bert_packed.config import ModelConfig
from bert_packed.packing.histogram import load_known_histogram

MODEL = ModelConfig(**{**CONFIG.__dict__, "vocab_size": 30522, "max_position_embeddings": 64})


def features_of(paths, name):
    """One feature of every record of some files, as TensorFlow reads it: list of lists."""
    records = [record for path in paths for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator()]
    features = [tf.train.Example.FromString(record).features.feature[name] for record in records]
    return [list(feature.int64_list.value or feature.float_list.value) for feature in features]


def test_batches_hold_what_their_names_say(tmp_path):
    """Means are those of all the data, and not of the few batches."""
    paths = write_sequences(tmp_path / "in", 40, 64, num_files=2)
    packed, unpacked = make_batches(tmp_path, ",".join(paths), 64, 3, 2, 3, MODEL)
    num_tokens = sum(map(sum, features_of(paths, schema.INPUT_MASK)))
    num_packs = len(features_of((tmp_path / "packed").glob("*.tfrecord"), schema.INPUT_MASK))
    assert len(features_of((tmp_path / "unpacked").glob("*.tfrecord"), schema.INPUT_MASK)) == 40 > num_packs
    assert (packed.sequences_per_row, unpacked.sequences_per_row) == (40 / num_packs, 1)
    assert (packed.tokens_per_row, unpacked.tokens_per_row) == (num_tokens / num_packs, num_tokens / 40)
    for data, depth in ((packed, 3), (unpacked, 1)):
        assert [batch["token_ids"].shape for batch in data.batches] == [(2, 64)] * 3
        assert max(batch["sequence_ids"].max() for batch in data.batches) == depth
        assert {batch["nsp_labels"].shape for batch in data.batches} == {(2, depth)}


def test_without_a_file_there_is_enough_for_every_batch(tmp_path):
    packed, unpacked = make_batches(tmp_path, "", 32, "max", 2, 2, MODEL)
    assert len(features_of((tmp_path / "sequences").glob("*.tfrecord"), schema.INPUT_MASK)) == 8 * 2 * 2
    assert len(packed.batches) == len(unpacked.batches) == 2 and packed.sequences_per_row > 1.3


def test_lengths_are_wikipedias():
    counts = load_known_histogram("wikipedia_512")
    lengths = draw_wikipedia_lengths(np.random.default_rng(0), 100_000, 512)
    shares = np.bincount(lengths, minlength=513)[1:] / len(lengths)
    for low, high in ((0, 100), (100, 200), (200, 400), (400, 511), (511, 512)):
        assert shares[low:high].sum() == pytest.approx(counts[low:high].sum() / counts.sum(), abs=0.01)
    # in proportion: a sequence of up to 8 tokens at 512 has one at 64, but MIN_LENGTH at least
    short = draw_wikipedia_lengths(np.random.default_rng(0), 100_000, 64)
    assert short.tolist() == [max(12, -(-length // 8)) for length in lengths.tolist()]
    assert draw_wikipedia_lengths(np.random.default_rng(0), 9, 8).tolist() == [8] * 9


def test_synthetic_lengths_are_as_described():
    lengths = draw_lengths(np.random.default_rng(0), 100_000, 512)
    assert lengths.min() == 12 and lengths.max() == 512
    assert np.mean(lengths == 512) == pytest.approx(0.4, abs=0.01)
    assert np.mean(lengths[lengths < 512]) == pytest.approx(256, abs=5)  # spread evenly around the middle


def test_synthetic_sequences_are_sound(tmp_path):
    """As asked for in number, and each with the predictions that its own tokens have room for."""
    paths = write_sequences(tmp_path, 10, 64, num_files=3, seed=1)
    assert [len(features_of([path], schema.INPUT_IDS)) for path in paths] == [3, 3, 4]
    names = (schema.INPUT_IDS, schema.INPUT_MASK, schema.SEGMENT_IDS, schema.MASKED_LM_POSITIONS)
    names += (schema.MASKED_LM_IDS, schema.MASKED_LM_WEIGHTS)
    for ids, mask, types, positions, labels, weights in zip(
        *(features_of(paths, n) for n in names), strict=True
    ):
        length, num_predictions = sum(mask), int(sum(weights))
        assert mask == [1] * length + [0] * (64 - length)
        assert all(ids[:length]) and not any(ids[length:])
        assert types == [0] * (length // 2) + [1] * (length - length // 2) + [0] * (64 - length)
        assert num_predictions == min(max(1, round(0.15 * length)), len(positions))
        used = positions[:num_predictions]
        assert used == sorted(set(used)) and used[0] >= 1 and used[-1] < length
        assert all(labels[:num_predictions]) and not any(
            labels[num_predictions:] + positions[num_predictions:]
        )
        assert weights == [1] * num_predictions + [0] * (len(weights) - num_predictions)
    again = write_sequences(tmp_path / "again", 10, 64, num_files=3, seed=1)
    other = write_sequences(tmp_path / "other", 10, 64, num_files=3, seed=2)
    ids = [features_of(some, schema.INPUT_IDS) for some in (paths, again, other)]
    assert ids[0] == ids[1] != ids[2]
    five = write_sequences(tmp_path / "five", 4, 64, num_files=1, draw=lambda rng, size, _: np.full(size, 5))
    assert [sum(mask) for mask in features_of(five, schema.INPUT_MASK)] == [5] * 4
