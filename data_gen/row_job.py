"""How files of sequences become rows of packs without padding: the steps of `row_steps.py`, in order.

Row r's t-th pack is number t * R + r of all packs, so that reading them in order, R a step, gives each row
its next pack, whose first sequence may go on from the row's pack before.
"""

import dataclasses
import os

import numpy as np

from bert_packed import schema
from bert_packed.assembly.row_data import RowData
from bert_packed.assembly.rows import plan_rows
from bert_packed.core.settings import InputError
from bert_packed.core.versions import versions
from bert_packed.packing import histogram as histograms
from bert_packed.records.provenance import provenance_path
from data_gen.jobs.steps import Step
from data_gen.pack_inputs import (
    count_lengths,
    cut_shards,
    describe_inputs,
    longest_length,
    read_inputs,
    release_run,
    write_ranks,
)
from data_gen.pack_steps import choose_run_bytes, sorted_run_path
from data_gen.row_steps import (
    CutWork,
    Rows,
    RowShard,
    cut_run,
    lay_row,
    measure_row_part,
    write_row_shard,
)
from data_gen.run_files import write_array


def pack_rows(config, stamps, promises, output, job):
    """Lay the records of some files into rows, cut into packs.

    Args:
        config: `PackConfig` with `split_sequences`.
        stamps: From `stamp_files`.
        promises: From `read_input_manifests`.
        output: `OutputDir`.
        job: `Job`.

    Returns:
        The manifest.
    """
    vocabulary, promised = promises
    length, num_rows = config.max_seq_length, config.num_rows
    run_bytes = choose_run_bytes(sum(size for _, size, _ in stamps))
    data = RowData(vocabulary.get("vocab_size"))
    read, runs = read_inputs(data, stamps, promised, run_bytes, output, job)
    totals = count_lengths(runs, longest_length(runs) + 1)
    if totals.sum() < num_rows:
        raise InputError(
            f"`num_rows` must be at most the number of sequences, {totals.sum()}. Received: {num_rows}."
        )
    lengths = np.flatnonzero(totals)
    plan = plan_rows(lengths, totals[lengths], num_rows)
    rows = Rows(output.work_folder, num_rows, length, config.random_seed)
    rows.save_plan(plan)
    counts = plan.row_counts.tolist()
    job.run(
        [Step(f"row-{row:06d}", lay_row, (rows, row), counts[row]) for row in range(num_rows)],
        "lay rows",
        "sequences",
    )
    num_steps = -(-int(plan.row_tokens.max()) // length)
    steps_per_part = max(1, run_bytes // (9 * length * num_rows))
    shards = cut_shards(num_steps, config.num_shards, steps_per_part)
    parts = [part for shard in shards for part in shard]
    _cut_runs(data, rows, runs, totals, parts, job)
    measured = job.run(
        [
            Step(f"measure-{p.index:06d}", measure_row_part, (rows, len(runs), p), p.last - p.first)
            for p in parts
        ],
        "measure packs",
        "steps",
    )
    spec = schema.PackSpec(length, max(most for most, _ in measured), 0)
    num_tokens, num_packs = int(lengths @ totals[lengths]), num_steps * num_rows
    return {
        "kind": "packed",
        "objective": schema.CAUSAL_LM,
        "split_sequences": True,
        "num_rows": num_rows,
        "settings": config.resolved(schema.CAUSAL_LM),
        "versions": versions(),
        "histogram": histograms.to_json(totals[1:]),
        "num_sequences": int(totals.sum()),
        "num_parts": sum(count for _, count in measured),
        "num_packs": num_packs,
        "num_tokens": num_tokens,
        "efficiency": num_tokens / (num_packs * length),
        "packing_factor": int(totals.sum()) / num_packs,
        "depth": spec.max_sequences_per_pack,
        "spec": dataclasses.asdict(spec),
        **vocabulary,
        **describe_inputs(read, config.output_dir),
        "files": _write_shards(config, rows, len(runs), shards, spec, output, job),
    }


def rows_metrics(manifest):
    """What is printed of rows: dict from column to value."""
    capacity = manifest["num_packs"] * manifest["spec"]["max_seq_length"]
    return {
        "rows": manifest["num_rows"],
        "sequences": manifest["num_sequences"],
        "parts": manifest["num_parts"],
        "packs": manifest["num_packs"],
        "depth": manifest["depth"],
        "tokens": manifest["num_tokens"],
        "padding": capacity - manifest["num_tokens"],
        "efficiency %": 100 * manifest["efficiency"],
        "packing factor": manifest["packing_factor"],
    }


def _cut_runs(data, rows, runs, totals, parts, job):
    """Cut the sequences of all runs into pieces, each run to its `sorted_run_path`."""
    part_ends = os.path.join(rows.folder, "part-ends.npy")
    write_array(part_ends, np.array([part.last for part in parts], np.int64))
    steps = []
    ranks = write_ranks(runs, totals, rows.folder)
    for number, (path, num_sequences) in enumerate(runs):
        target = sorted_run_path(rows.folder, number)
        work = CutWork(data, rows, path, target, ranks[number], part_ends)
        steps.append(Step(f"cut-{number:06d}", cut_run, work, num_sequences))
    job.run(steps, "cut sequences", "sequences", release_run)


def _write_shards(config, rows, num_runs, shards, spec, output, job):
    """Write all shards: the manifest's list of files."""
    steps = []
    for shard, parts in enumerate(shards):
        path = output.path(f"packed-{shard:05d}-of-{len(shards):05d}.tfrecord")
        index_path = provenance_path(path) if config.provenance else ""
        work = RowShard(rows, num_runs, parts, path, spec, index_path)
        num_packs = (parts[-1].last - parts[0].first) * rows.num_rows
        steps.append(Step(f"write-{shard:06d}", write_row_shard, work, num_packs))
    return job.run(steps, "write packs", "packs")
