"""The same sequences as batches of packs and of padded rows: what the benchmarks of training run on."""

import dataclasses
import itertools
import os

import numpy as np

from benchmarks.synthetic_data import MIN_LENGTH, write_sequences
from bert_packed.core.settings import InputError
from bert_packed.data.input_pipeline import CheckedBatches, eval_batches
from bert_packed.packing.histogram import load_known_histogram
from bert_packed.records import first_records
from bert_packed.records.inputs import find_files
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack

HISTOGRAM = "wikipedia_512"


@dataclasses.dataclass(frozen=True)
class Batches:
    """Some batches of one shape, and the mean of the data that they are taken from.

    Attributes:
        batches: List of batch dicts of `[B, ...]` arrays.
        sequences_per_row, tokens_per_row: Means over all the data, padding not counted; the few batches timed
            would say too much or too little.
    """

    batches: list[dict]
    sequences_per_row: float
    tokens_per_row: float


def make_batches(folder, input_file, max_seq_length, depth, batch_size, num_batches, model_config):
    """Pack sequences, at a depth and at depth 1, and read batches of both.

    Args:
        folder: Existing folder for the records.
        input_file: Unpacked records; "" makes random tokens, as long as Wikipedia's sequences.
        max_seq_length: S.
        depth: Sequences per pack, or "max".
        batch_size: B.
        num_batches: Batches to read of each.
        model_config: `ModelConfig` that ids must fit.

    Returns:
        Two `Batches`: packed, and one sequence a row.

    Raises:
        InputError: there are too few sequences.
    """
    if input_file:
        paths = find_files(input_file, "input_file")
    else:
        num_sequences = 8 * batch_size * num_batches
        target = os.path.join(folder, "sequences")
        paths = write_sequences(target, num_sequences, max_seq_length, 1, draw=draw_wikipedia_lengths)
    result = []
    for name, its_depth in (("packed", depth), ("unpacked", 1)):
        output = os.path.join(folder, name)
        os.makedirs(output)
        manifest = pack(
            PackConfig(
                input_file=",".join(paths),
                output_dir=output,
                max_seq_length=max_seq_length,
                max_sequences_per_pack=its_depth,
            )
        )
        if manifest["num_packs"] < batch_size * num_batches:
            raise InputError(
                f"`input_file` must hold enough for {num_batches} batches of {batch_size} packs. "
                f"Received: {manifest['num_packs']} packs."
            )
        files = find_files(os.path.join(output, "*.tfrecord"), "output_dir")
        spec = first_records.read_pack_spec(files)
        batches = CheckedBatches(eval_batches(files, spec, batch_size), files, spec, model_config)
        histogram = manifest["histogram"]
        result.append(
            Batches(
                list(itertools.islice(batches, num_batches)),
                manifest["num_sequences"] / manifest["num_packs"],
                float(np.dot(histogram["lengths"], histogram["counts"])) / manifest["num_packs"],
            )
        )
    return result


def draw_wikipedia_lengths(rng, num_sequences, max_seq_length):
    """Random lengths as in the papers' Wikipedia data, in proportion to S: int64 `[num_sequences]`."""
    counts = load_known_histogram(HISTOGRAM)
    lengths = 1 + rng.choice(len(counts), num_sequences, p=counts / counts.sum())
    lengths = -(-lengths * max_seq_length // len(counts))
    return np.clip(lengths, min(MIN_LENGTH, max_seq_length), max_seq_length)
