"""Packing of files: the steps of `pack_steps.py`, in order, and the manifest."""

import collections
import dataclasses
import itertools
import logging
import time

import numpy as np

from bert_packed.assembly.assignment import plan_rows
from bert_packed.assembly.feature_packs import FeatureKind, parse_features
from bert_packed.assembly.record_kinds import BertKind, CausalKind
from bert_packed.core import storage
from bert_packed.core.runtime import code_sha256, versions
from bert_packed.core.settings import InputError
from bert_packed.packing import plan as plans
from bert_packed.records.inputs import find_files, read_input_manifests, stamp_files
from bert_packed.records.provenance import describe_path, provenance_path
from bert_packed.records.record_rules import find_common_objective
from bert_packed.schema import CAUSAL_LM, MLM_NSP
from data_gen import pack_steps
from data_gen.assignments import CutRows, PlannedPacks, lay_row
from data_gen.jobs.output import open_output_dir, refuse_own_input
from data_gen.jobs.runners import check_runner, choose_num_workers
from data_gen.jobs.steps import Job, Step, read_array, write_array
from data_gen.pack_steps import PackWork, Part, ReadWork, ShardWork

logger = logging.getLogger(__name__)


def pack(config, seconds=None):
    """Pack the records of `config.input_file` into `config.output_dir`; returns the manifest, a dict.

    The packs and `manifest.json` appear together. The same call continues a run that was killed. `seconds`, a
    dict, receives the time of each phase.
    """
    start, seconds = time.monotonic(), {} if seconds is None else seconds
    check_runner(config.runner, config.num_workers)
    paths = find_files(config.input_file, "input_file")
    refuse_own_input(paths, config.output_dir)
    stamps, promises = stamp_files(paths), read_input_manifests(paths)
    objective = MLM_NSP if config.features else find_common_objective(paths)
    config.check_objective(objective)
    identity = {
        "settings": config.resolved(objective),
        "inputs": stamps,
        "input manifests": promises,
        "versions": versions(),
        "code": code_sha256(),
    }
    num_workers = choose_num_workers(config.num_workers, sum(size for _, size, _ in stamps))
    with open_output_dir(config.output_dir, config.overwrite, identity) as output:
        manifest = output.manifest
        if manifest is None:
            with Job(output.work_folder, num_workers, config.runner, seconds) as job:
                manifest = _pack_inputs(config, objective, stamps, promises, output, job)
            output.write_manifest(manifest)
    logger.info(
        "packed %d sequences of %d files into %d packs of %d files in %.1f s%s",
        *(manifest["num_sequences"], len(paths), manifest["num_packs"], len(manifest["files"])),
        time.monotonic() - start,
        f" ({', '.join(f'{phase} {taken:.1f}' for phase, taken in seconds.items())})" if seconds else "",
    )
    return manifest


def metrics_row(manifest):
    """The papers' metrics of a packed data set, by column."""
    efficiency = {"efficiency %": 100 * manifest["efficiency"], "packing factor": manifest["packing_factor"]}
    if manifest.get("split_sequences"):
        return {
            "rows": manifest["num_rows"],
            "sequences": manifest["num_sequences"],
            "parts": manifest["num_parts"],
            "packs": manifest["num_packs"],
            "depth": manifest["depth"],
            "tokens": manifest["num_tokens"],
            "padding": manifest["num_packs"] * manifest["spec"]["max_seq_length"] - manifest["num_tokens"],
            **efficiency,
        }
    packed = manifest["plan"]
    row = {
        "algorithm": packed["algorithm"],
        "depth asked": str(packed["max_sequences_per_pack"]),
        "depth": manifest["depth"],
        "strategies": len(packed["strategies"]),
        "sequences": manifest["num_sequences"],
        "packs": manifest["num_packs"],
        "lower bound": manifest["lower_bound"],
        "gap": manifest["gap"],
    }
    if "max_seq_length" in packed:  # not --features of several capacities
        plan = plans.from_json(packed)
        tight = packed["certificate"]["tight"]  # computing it again takes seconds for long packs
        row |= {"tight bound": tight, "tokens": plan.num_tokens, "padding": plan.num_padding}
    return row | efficiency


def make_kind(config, objective, vocab_size):
    if config.features:
        return FeatureKind(parse_features(config.features), config.overlong)
    common = (config.max_seq_length, config.overlong, vocab_size)
    if objective == CAUSAL_LM:
        return CausalKind(*common, config.split_sequences)
    return BertKind(*common, config.max_predictions_per_pack, config.masked_lm_weights)


def _pack_inputs(config, objective, stamps, promises, output, job):
    vocabulary, promised = promises
    kind, folder = make_kind(config, objective, vocabulary.get("vocab_size")), output.work_folder
    run_bytes = pack_steps.choose_run_bytes(sum(size for _, size, _ in stamps))
    steps = []
    for index, stamp in enumerate(stamps):
        path, size, _ = stamp
        work = ReadWork(kind, stamp, index, promised.get(path, {}), folder, run_bytes)
        steps.append(Step(f"read-{index:06d}", pack_steps.read_file, work, size))
    read = job.run(steps, "read sequences", "B")
    runs = [run for result in read for run in result["runs"]]
    totals = _count_lengths(runs, kind.num_lengths)

    assign = _assign_to_rows if config.split_sequences else _assign_to_plan
    assignment, planned = assign(config, kind, totals, folder, job)
    shards = cut_shards(
        planned["num_packs"],
        config.num_shards,
        run_bytes // pack_steps.pack_bytes(kind, planned["packing_factor"]),
        config.num_rows or 1,
    )
    parts = [part for shard in shards for part in shard]
    work = PackWork(assignment, folder, len(runs), len(parts), pack_steps.choose_num_levels(len(runs)))
    _sort_runs(work, runs, totals, parts, job)
    _merge_runs(work, job)
    steps = [
        Step(f"measure-{p.index:06d}", pack_steps.measure_part, (work, p), p.last - p.first) for p in parts
    ]
    depths, num_pieces, measured = zip(*job.run(steps, "measure packs", "packs"), strict=True)
    planned["depth"] = max(depths)
    if config.split_sequences:
        planned["num_parts"] = sum(num_pieces)
    is_limited = config.max_sequences_per_pack != "max"
    spec = kind.make_spec(config.max_sequences_per_pack if is_limited else max(depths), max(measured))
    num_overlong = collections.Counter()
    for result in read:
        num_overlong.update(result["num_overlong"])
    inputs = [describe_path(r["entry"]["path"], config.output_dir) | r["entry"] for r in read]
    return {
        "kind": "packed",
        **({"objective": objective} if objective == CAUSAL_LM else {}),
        **({"split_sequences": True, "num_rows": config.num_rows} if config.split_sequences else {}),
        "settings": config.resolved(objective),
        "versions": versions(),
        "histogram": kind.describe_lengths(totals),
        **planned,
        "spec": dataclasses.asdict(spec),
        **vocabulary,
        "num_records": sum(entry["num_records"] for entry in inputs),
        "num_overlong": dict(num_overlong),
        "inputs": inputs,
        "files": _write_shards(config, work, shards, spec, output, job),
    }


def _count_lengths(runs, num_lengths):
    """Histogram of lengths in all runs: int64 `[num_lengths]`, or to the largest length where that is 0."""
    totals = np.zeros(num_lengths, np.int64)
    for path, _ in runs:
        lengths, counts = read_array(pack_steps.histogram_path(path))
        totals = np.pad(totals, (0, max(0, int(lengths.max()) + 1 - len(totals))))
        totals[lengths] += counts
    return totals


def make_plan(arguments):
    """Planning step: (kind, histogram, algorithm, depth) -> JSON for the manifest."""
    kind, *rest = arguments
    return kind.make_plan(*rest)


def _assign_to_plan(config, kind, totals, folder, job):
    """`PlannedPacks`, and the manifest's entries about the plan."""
    if not totals.sum():
        raise InputError("`input_file` must leave a sequence to pack. Received: only overlong ones.")
    arguments = (kind, totals.tolist(), config.algorithm, config.max_sequences_per_pack)
    (planned,) = job.run([Step("plan", make_plan, arguments)], "plan")
    strategies = {tuple(strategy): count for strategy, count in planned["plan"]["strategies"]}
    return PlannedPacks(kind, strategies, config.random_seed), planned


def _assign_to_rows(config, kind, totals, folder, job):
    """`CutRows`, and the manifest's entries about rows; those that are None are known after cutting."""
    num_rows, num_sequences = config.num_rows, int(totals.sum())
    if num_sequences < num_rows:
        raise InputError(
            f"`num_rows` must be at most the number of sequences, {num_sequences}. Received: {num_rows}."
        )
    lengths = np.flatnonzero(totals)
    plan = plan_rows(lengths, totals[lengths], num_rows)
    rows = CutRows(kind, num_rows, config.random_seed, folder)
    rows.save_plan(plan)
    counts = enumerate(plan.row_counts.tolist())
    job.run([Step(f"row-{r:06d}", lay_row, (rows, r), count) for r, count in counts], "lay rows", "sequences")
    num_packs = num_rows * -(-int(plan.row_tokens.max()) // config.max_seq_length)
    num_tokens = int(plan.row_tokens.sum())
    return rows, {
        "num_sequences": num_sequences,
        "num_parts": None,
        "num_packs": num_packs,
        "num_tokens": num_tokens,
        "efficiency": num_tokens / (num_packs * config.max_seq_length),
        "packing_factor": num_sequences / num_packs,
        "depth": None,
    }


def cut_shards(num_packs, num_shards, packs_per_part, num_rows=1):
    """Divide packs into nonempty shards of about equal size, multiples of `num_rows`: tuples of `Part`."""
    num_steps = num_packs // num_rows
    num_shards = min(num_shards, num_steps)
    limits = [num_steps * shard // num_shards * num_rows for shard in range(num_shards + 1)]
    size = max(1, packs_per_part)
    shards, index = [], 0
    for first, last in itertools.pairwise(limits):
        starts = range(first, last, size)
        shards.append(
            tuple(Part(index + i, start, min(start + size, last)) for i, start in enumerate(starts))
        )
        index += len(starts)
    return shards


def _sort_runs(work, runs, totals, parts, job):
    """Sort all runs by part; each is removed once it is sorted."""
    write_array(work.part_ends_path, np.array([part.last for part in parts], np.int64))
    # Tables are on disk: one array per run in memory would grow with lengths times sequences
    steps, before = [], np.zeros_like(totals)
    for number, (path, num_sequences) in enumerate(runs):
        lengths, counts = read_array(pack_steps.histogram_path(path))
        write_array(work.ranks_path(number), np.stack([lengths, before[lengths], totals[lengths]]))
        before[lengths] += counts
        steps.append(Step(f"sort-{number:06d}", pack_steps.sort_run, (work, number, path), num_sequences))
    job.run(steps, "sort sequences", "sequences", lambda step: _remove_files(step.argument[-1:]))


def _merge_runs(work, job):
    """Merge sorted runs, level by level; files leave the disk once all of their groups are merged."""
    for level in range(1, work.num_levels):
        steps = [
            Step(f"merge-{level}-{number:06d}-{span:06d}", pack_steps.merge_runs, (work, level, number, span))
            for number, span in itertools.product(*work.places(level))
        ]

        def source(step):
            _, level, number, span = step.argument
            return level - 1, number, span // work.fan_out

        left = collections.Counter(map(source, steps))

        def release(step, left=left):
            left[source(step)] -= 1
            if not left[source(step)]:
                _remove_files(work.sorted_paths(*source(step)))

        job.run(steps, f"merge runs, level {level}", release=release)


def _remove_files(paths):
    for path in filter(storage.exists, paths):
        storage.remove(path)


def _write_shards(config, work, shards, spec, output, job):
    steps = []
    for shard, parts in enumerate(shards):
        path = output.path(f"packed-{shard:05d}-of-{len(shards):05d}.tfrecord")
        index_path = provenance_path(path) if config.provenance else ""
        num_packs = parts[-1].last - parts[0].first
        step = ShardWork(work, parts, path, spec, index_path)
        steps.append(Step(f"write-{shard:06d}", pack_steps.write_shard, step, num_packs))
    return job.run(steps, "write packs", "packs")
