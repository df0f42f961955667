"""How files of sequences become files of packs: the steps of `pack_steps.py`, in order, and the manifest."""

import dataclasses
import logging
import os
import time

import numpy as np

from bert_packed.assembly.bert_data import BertData
from bert_packed.assembly.causal_data import CausalData
from bert_packed.assembly.feature_data import FeatureData
from bert_packed.assembly.feature_spec import parse_features
from bert_packed.core.settings import InputError
from bert_packed.core.versions import code_sha256, versions
from bert_packed.packing import plan as plans
from bert_packed.records.first_records import find_common_objective
from bert_packed.records.inputs import find_files, read_input_manifests, stamp_files
from bert_packed.records.provenance import provenance_path
from bert_packed.schema import CAUSAL_LM, MLM_NSP
from data_gen.jobs.output import open_output_dir, refuse_own_input
from data_gen.jobs.runners import check_runner, choose_num_workers
from data_gen.jobs.steps import Job, Step
from data_gen.jobs.timeline import Timeline
from data_gen.pack_inputs import (
    count_lengths,
    cut_shards,
    describe_inputs,
    read_inputs,
    release_run,
    write_ranks,
)
from data_gen.pack_steps import (
    PackWork,
    ShardWork,
    SortWork,
    choose_run_bytes,
    measure_part,
    sort_run,
    sorted_run_path,
    write_shard,
)
from data_gen.row_job import pack_rows, rows_metrics
from data_gen.run_files import write_array

logger = logging.getLogger(__name__)


def pack(config, timeline=None):
    """Pack the records of `config.input_file` into `config.output_dir`.

    The directory receives `packed-00000-of-0000N.tfrecord`, ... and `manifest.json`, all or none. A run that
    was killed is continued by the same call.

    Args:
        config: `PackConfig` with `input_file` and `output_dir`.
        timeline: `Timeline` that receives the phases; None where nobody asks.

    Returns:
        The manifest, a dict.

    Raises:
        InputError: an input cannot be used, or the output directory is in use.
    """
    start = time.monotonic()
    timeline = timeline or Timeline(age=0.0)  # the process may have run for days
    timeline.enter("check inputs")
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
        if output.manifest is None:
            with Job(output.work_folder, num_workers, config.runner, timeline) as job:
                if config.split_sequences:
                    manifest = pack_rows(config, stamps, promises, output, job)
                else:
                    manifest = _pack_inputs(config, objective, stamps, promises, output, job)
            output.write_manifest(manifest)
        else:
            manifest = output.manifest
    timeline.finish("publish")
    logger.info(
        "packed %d sequences of %d files into %d packs of %d files in %.1f s%s",
        *(manifest["num_sequences"], len(paths), manifest["num_packs"], len(manifest["files"])),
        time.monotonic() - start,
        f" ({phases})" if (phases := timeline.describe()) else "",
    )
    return manifest


def metrics_row(manifest):
    """The papers' metrics of a packed data set, as one row of a table: dict from column to value."""
    if manifest.get("split_sequences"):
        return rows_metrics(manifest)
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
    if "max_seq_length" in packed:  # of one length
        plan = plans.from_json(packed)
        tight = packed["certificate"]["tight"]  # computed anew, it takes seconds for long packs
        row |= {"tight bound": tight, "tokens": plan.num_tokens, "padding": plan.num_padding}
    efficiency, factor = manifest["efficiency"], manifest["packing_factor"]
    return {**row, "efficiency %": 100 * efficiency, "packing factor": factor}


def make_plan(arguments):
    """The step that plans: (data, histogram, algorithm, depth asked for) -> JSON for the manifest."""
    data, *rest = arguments
    return data.make_plan(*rest)


def make_data(config, objective, vocab_size):
    """What the records are, by the settings and the objective: `BertData`, `CausalData` or `FeatureData`."""
    if config.features:
        return FeatureData(parse_features(config.features), config.overlong)
    if objective == CAUSAL_LM:
        return CausalData(config.max_seq_length, config.overlong, vocab_size)
    return BertData(
        config.max_seq_length,
        config.overlong,
        vocab_size,
        config.max_predictions_per_pack,
        config.masked_lm_weights,
    )


def _pack_inputs(config, objective, stamps, promises, output, job):
    """All steps; returns the manifest."""
    vocabulary, promised = promises
    data = make_data(config, objective, vocabulary.get("vocab_size"))
    run_bytes = choose_run_bytes(sum(size for _, size, _ in stamps))
    read, runs = read_inputs(data, stamps, promised, run_bytes, output, job)
    totals = count_lengths(runs, data.num_lengths)
    if not totals.sum():
        raise InputError("`input_file` must leave a sequence to pack. Received: only overlong ones.")
    arguments = (data, totals.tolist(), config.algorithm, config.max_sequences_per_pack)
    (planned,) = job.run([Step("plan", make_plan, arguments)], "plan")
    strategies = {tuple(strategy): count for strategy, count in planned["plan"]["strategies"]}

    packs_per_part = max(1, run_bytes // data.pack_bytes(planned["packing_factor"]))
    shards = cut_shards(planned["num_packs"], config.num_shards, packs_per_part)
    parts = [part for shard in shards for part in shard]
    _sort_runs(data, runs, totals, strategies, parts, config.random_seed, output, job)
    work = PackWork(data, strategies, output.work_folder, len(runs), config.random_seed)
    steps = [Step(f"measure-{p.index:06d}", measure_part, (work, p), p.last - p.first) for p in parts]
    is_limited = config.max_sequences_per_pack != "max"
    depth = config.max_sequences_per_pack if is_limited else planned["depth"]
    spec = data.make_spec(depth, max(job.run(steps, "measure packs", "packs")))
    return {
        "kind": "packed",
        **({"objective": objective} if objective == CAUSAL_LM else {}),
        "settings": config.resolved(objective),
        "versions": versions(),
        "histogram": data.describe_lengths(totals),
        **planned,
        "spec": dataclasses.asdict(spec),
        **vocabulary,
        **describe_inputs(read, config.output_dir),
        "files": _write_shards(config, work, shards, spec, output, job),
    }


def _sort_runs(data, runs, totals, strategies, parts, seed, output, job):
    """Sort all runs by part, each to its `sorted_run_path`."""
    part_ends = os.path.join(output.work_folder, "part-ends.npy")
    write_array(part_ends, np.array([part.last for part in parts], np.int64))
    steps = []
    ranks = write_ranks(runs, totals, output.work_folder)
    for number, (path, num_sequences) in enumerate(runs):
        target = sorted_run_path(output.work_folder, number)
        work = SortWork(data, path, target, ranks[number], strategies, part_ends, seed)
        steps.append(Step(f"sort-{number:06d}", sort_run, work, num_sequences))
    job.run(steps, "sort sequences", "sequences", release_run)


def _write_shards(config, work, shards, spec, output, job):
    """Write all shards: the manifest's list of files."""
    steps = []
    for shard, parts in enumerate(shards):
        path = output.path(f"packed-{shard:05d}-of-{len(shards):05d}.tfrecord")
        index_path = provenance_path(path) if config.provenance else ""
        shard_work = ShardWork(work, parts, path, spec, index_path)
        num_packs = parts[-1].last - parts[0].first
        steps.append(Step(f"write-{shard:06d}", write_shard, shard_work, num_packs))
    return job.run(steps, "write packs", "packs")
