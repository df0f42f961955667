"""How files of sequences become files of packs: read, plan, assign, gather, write."""

import dataclasses

import numpy as np
from tqdm import tqdm

from data_gen import records, schema
from data_gen.assemble import assemble_packs, assign_sequences, count_predictions
from data_gen.input_files import find_files
from data_gen.input_manifest import check_num_records, check_vocabulary, read_input_manifests
from data_gen.output import open_output_dir, refuse_own_input
from data_gen.overlong import fit_lengths
from data_gen.packing import histogram as histograms
from data_gen.packing import plan as plans
from data_gen.packing.algorithms import ALGORITHMS
from data_gen.read_unpacked import read_unpacked
from data_gen.sequences import concatenate
from data_gen.settings import InputError

PACKS_AT_ONCE = 512  # gathered and encoded together: 512 packs of S=512 take about 5 MB


def pack(config):
    """Pack the records of `config.input_file` into `config.output_dir`.

    The directory receives `packed-00000-of-0000N.tfrecord`, ... and `manifest.json`, all or none.

    Args:
        config: `PackConfig` with `input_file` and `output_dir`.

    Returns:
        The manifest, a dict.

    Raises:
        InputError: an input cannot be used, or the output directory is in use.
    """
    files = find_files(config.input_file, "input_file")
    refuse_own_input(files, config.output_dir)
    with open_output_dir(config.output_dir, config.overwrite) as output:
        sequences, inputs, vocabulary = read_inputs(files)
        sequences, num_overlong = fit_lengths(sequences, config.max_seq_length, config.overlong)
        if len(sequences) == 0:
            raise InputError("`input_file` must leave a sequence to pack. Received: only overlong ones.")
        histogram = histograms.count_lengths(sequences.lengths, config.max_seq_length)
        arguments = (histogram, config.max_seq_length, config.max_sequences_per_pack)
        plan = ALGORITHMS[config.algorithm](*arguments)
        plans.validate_plan(plan, histogram)

        packs = assign_sequences(plan, sequences.lengths, config.seed)
        spec = _make_spec(config, plan, count_predictions(packs, sequences.num_predictions))
        manifest = {
            "kind": "packed",
            "settings": config.resolved(),
            "histogram": histograms.to_json(histogram),
            "plan": plan.to_json(),
            "num_sequences": plan.num_sequences,
            "num_packs": plan.num_packs,
            "efficiency": plan.efficiency,
            "packing_factor": plan.packing_factor,
            "depth": plan.depth,
            "lower_bound": plan.certificate.lower_bound,
            "gap": plan.certificate.gap,
            "seed": config.seed,
            "spec": dataclasses.asdict(spec),
            **vocabulary,
            "num_overlong": num_overlong,
            "inputs": inputs,
            "files": _write_shards(sequences, packs, spec, config.num_shards, output),
        }
        output.write_manifest(manifest)
    return manifest


def read_inputs(files):
    """Read all sequences of unpacked files.

    Returns:
        `Sequences`; list of dicts `path`, `num_records`, `sha256`; dict of what is known of the vocabulary.

    Raises:
        InputError: a record cannot be used, a token is outside the vocabulary, or a file and the manifest
            beside it disagree.
    """
    vocabulary, promised = read_input_manifests(files)
    parts, inputs = [], []
    with tqdm(desc="reading sequences", unit=" sequences", disable=None) as progress:
        for path in files:
            num_records = 0
            for part in read_unpacked(path):
                check_vocabulary(part, vocabulary.get("vocab_size"))
                parts.append(part)
                num_records += len(part)
                progress.update(len(part))
            check_num_records(path, num_records, promised)
            entry = {"path": path, "num_records": num_records, "sha256": records.file_sha256(path)}
            inputs.append(entry)
    return concatenate(parts), inputs, vocabulary


def metrics_row(manifest):
    """The papers' metrics of a packed data set, as one row of a table: dict from column to value."""
    plan = plans.from_json(manifest["plan"])
    certificate = plan.certificate
    return {
        "algorithm": plan.algorithm,
        "depth asked": str(plan.max_sequences_per_pack),
        "depth": plan.depth,
        "strategies": len(plan.strategies),
        "sequences": plan.num_sequences,
        "packs": plan.num_packs,
        "lower bound": certificate.lower_bound,
        "gap": certificate.gap,
        "tight bound": certificate.tight,
        "tokens": plan.num_tokens,
        "padding": plan.num_padding,
        "efficiency %": 100 * plan.efficiency,
        "packing factor": plan.packing_factor,
    }


def _make_spec(config, plan, num_predictions):
    depth = plan.depth if config.max_sequences_per_pack == "max" else config.max_sequences_per_pack
    # a feature of length 0 cannot be told from a missing one: data without predictions keeps one slot
    needed = max(int(num_predictions.max()), 1)
    if config.max_predictions_per_pack and config.max_predictions_per_pack < needed:
        raise InputError(
            f"`max_predictions_per_pack` must be at least {needed}, which the fullest pack needs, or 0. "
            f"Received: {config.max_predictions_per_pack}."
        )
    return schema.PackSpec(config.max_seq_length, depth, config.max_predictions_per_pack or needed)


def _write_shards(sequences, packs, spec, num_shards, output):
    """Write all packs in order; returns the manifest's list of files."""
    num_shards = min(num_shards, len(packs))  # no shard is empty
    limits = np.linspace(0, len(packs), num_shards + 1).astype(np.int64)
    entries = []
    with tqdm(desc="writing packs", unit=" packs", total=len(packs), disable=None) as progress:
        for shard in range(num_shards):
            path = output.path(f"packed-{shard:05d}-of-{num_shards:05d}.tfrecord")
            serialized = _serialize(sequences, packs, spec, limits[shard], limits[shard + 1], progress)
            entries.append(records.write_records(path, serialized).to_json())
    return entries


def _serialize(sequences, packs, spec, first, last, progress):
    """Yield the packs `first` to `last`, the latter excluded, as records."""
    for start in range(first, last, PACKS_AT_ONCE):
        part = packs.part(start, min(start + PACKS_AT_ONCE, last))
        yield from records.serialize_examples(assemble_packs(sequences, part, spec))
        progress.update(len(part))
