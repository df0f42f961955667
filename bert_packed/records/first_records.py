"""Objective and fixed lengths of the records of a file, by the first of them."""

import os
import shlex

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records.examples import feature_lengths, feature_names
from bert_packed.records.tfrecords import first_record


def find_objective(path):
    """The objective of the records of a file, packed or not, as `PackSpec.objective`."""
    # what has no `label_mask` counts as BERT's, and its readers report what is missing
    names = feature_names(first_record(path), path, 1)
    return schema.CAUSAL_LM if schema.LABEL_MASK in names else schema.MLM_NSP


def find_common_objective(paths):
    """The objective that all files are for; raises `InputError` where they disagree."""
    found = {find_objective(path): path for path in paths}
    if len(found) > 1:
        raise InputError(f"all files must be for one objective. Received: {found}.")
    return next(iter(found))


def read_pack_spec(paths, argument="input_file", pattern=None, kinds=None):
    """Read S, K and P from the first record of every file of packs: `schema.PackSpec`.

    Args:
        paths: List of paths, at least one.
        argument, pattern: Flag and value that name them, for the command in the message about unpacked files.
        kinds: Which feature has which length, `schema.PACKED_LENGTHS` or `schema.CAUSAL_LENGTHS`; None for
            those of the records' objective.

    Raises:
        InputError: files disagree, a file holds unpacked records, or features are missing or of lengths that
            no packed record has.
    """
    specs = {}
    for path in paths:
        record = first_record(path)
        names = feature_names(record, path, 1)
        if schema.POSITION_IDS not in names and any(
            all(name in names for name in unpacked)
            for unpacked in (schema.UNPACKED_LENGTHS, schema.CAUSAL_UNPACKED_LENGTHS)
        ):
            raise InputError(_say_pack_first(path, record, argument, pattern or path))
        is_causal = kinds is None and schema.LABEL_MASK in names
        wanted = kinds or (schema.CAUSAL_LENGTHS if is_causal else schema.PACKED_LENGTHS)
        lengths = feature_lengths(record, path, 1, wanted)
        sizes = {"P": 0, **common_lengths(lengths, wanted, path)}
        specs[path] = schema.PackSpec(sizes["S"], sizes["K"], sizes["P"])
    first = paths[0]
    for path, spec in specs.items():
        if spec.objective != specs[first].objective:
            raise InputError(
                "all files of packs must be for one objective. Received: "
                f"{first}: {specs[first].objective}; {path}: {spec.objective}."
            )
        if spec != specs[first]:
            raise InputError(
                "all files of packs must have one max_seq_length, max_sequences_per_pack and "
                f"max_predictions_per_pack. Received: {first}: {_spec_text(specs[first])}; "
                f"{path}: {_spec_text(spec)}. Pack them together, or with the same "
                "--max_sequences_per_pack and --max_predictions_per_pack."
            )
    return specs[first]


def common_lengths(lengths, kinds, path):
    """Lengths by name, "S", "K" and "P"; `InputError` where features are not equally long by `kinds`."""
    sizes = {}
    for name, kind in kinds.items():
        wanted = kind if isinstance(kind, int) else sizes.setdefault(kind, lengths[name])
        if lengths[name] != wanted:
            raise InputError(
                f"{path}, record 1: {name} must have length {wanted}. Received: {lengths[name]}."
            )
    return sizes


def _say_pack_first(path, record, argument, pattern):
    """The message about unpacked records, with the command that packs them."""
    length = feature_lengths(record, path, 1, [schema.INPUT_IDS])[schema.INPUT_IDS]
    if schema.LABEL_MASK in feature_names(record, path, 1):
        length = "LENGTH"  # no padding says how long others are
    name = "packed" if argument == "input_file" else f"packed_{argument.removesuffix('_input_file')}"
    folder = os.path.join(os.path.dirname(path) or ".", name)
    return (
        f"{path} holds unpacked records; pack them first: python data_gen/pack_tfrecords.py "
        f"--input_file={shlex.quote(pattern)} --max_seq_length={length} --output_dir={shlex.quote(folder)}"
    )


def _spec_text(spec):
    return f"{spec.max_seq_length}, {spec.max_sequences_per_pack}, {spec.max_predictions_per_pack}"
