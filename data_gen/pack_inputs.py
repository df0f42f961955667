"""What both ways of packing share: input files become runs, runs are counted, packs are cut into shards."""

import itertools
import os

import numpy as np

from bert_packed.core import files
from bert_packed.records.provenance import describe_path
from data_gen.jobs.steps import Step
from data_gen.pack_steps import Part, ReadWork, histogram_path, read_file
from data_gen.run_files import read_array, write_array


def read_inputs(data, stamps, promised, run_bytes, output, job):
    """Read all files: list of the results of `read_file`, and list of [path, sequences] of all runs."""
    steps = []
    for index, stamp in enumerate(stamps):
        path, size, _ = stamp
        work = ReadWork(data, stamp, index, promised.get(path, {}), output.work_folder, run_bytes)
        steps.append(Step(f"read-{index:06d}", read_file, work, size))
    read = job.run(steps, "read sequences", "B")
    return read, [run for result in read for run in result["runs"]]


def count_lengths(runs, num_lengths):
    """Sequences of each length in all runs: int64 `[num_lengths]`."""
    totals = np.zeros(num_lengths, np.int64)
    for path, _ in runs:
        lengths, counts = read_array(histogram_path(path))
        totals[lengths] += counts
    return totals


def longest_length(runs):
    """The longest sequence of all runs; 0 where there is none."""
    return max((int(read_array(histogram_path(path))[0].max()) for path, _ in runs), default=0)


def write_ranks(runs, totals, folder):
    """Write for each run how many sequences of each length stand before it: list of paths.

    Each is an int array `[3, m]`: the lengths in the run, and how many sequences of each there are before the
    run, and in all. On the disk, since one array a run in memory would grow with lengths times sequences.
    """
    paths, before = [], np.zeros_like(totals)
    for number, (path, _) in enumerate(runs):
        lengths, counts = read_array(histogram_path(path))
        paths.append(os.path.join(folder, f"ranks-{number:06d}.npy"))
        write_array(paths[-1], np.stack([lengths, before[lengths], totals[lengths]]))
        before[lengths] += counts
    return paths


def release_run(step):
    """Remove the run that a step has sorted."""
    if files.exists(step.argument.run):
        files.remove(step.argument.run)


def cut_shards(num_packs, num_shards, packs_per_part):
    """Cut packs into shards, about equally large and none empty, and these into parts.

    Returns:
        List of tuples of `Part`.
    """
    num_shards = min(num_shards, num_packs)
    limits = [num_packs * shard // num_shards for shard in range(num_shards + 1)]
    shards, index = [], 0
    for first, last in itertools.pairwise(limits):
        starts = range(first, last, packs_per_part)
        shards.append(
            tuple(Part(index + i, start, min(start + packs_per_part, last)) for i, start in enumerate(starts))
        )
        index += len(starts)
    return shards


def describe_inputs(read, output_dir):
    """What a manifest says of the inputs, from the results of `read_file`: dict."""
    return {
        "num_records": sum(result["entry"]["num_records"] for result in read),
        "num_overlong": _add_up(result["num_overlong"] for result in read),
        "inputs": [describe_path(result["entry"]["path"], output_dir) | result["entry"] for result in read],
    }


def _add_up(dicts):
    """Sums of the values under each key."""
    total = {}
    for counts in dicts:
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
    return total
