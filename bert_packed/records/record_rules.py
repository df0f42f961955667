"""Rules that records of several forms share: objective, fixed lengths, values; errors name the record."""

import dataclasses
import os
import shlex

import numpy as np

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records.examples import feature_lengths, feature_names
from bert_packed.records.sequences import range_indices
from bert_packed.records.tfrecords import first_record

INT32_MAX = np.iinfo(np.int32).max


class LayoutError(InputError):
    """A packed record breaks a rule of `schema.py`'s layout."""


def make_check(batch, error=InputError):
    """A function that raises `error` where an entry of a batch of `Records` breaks a rule."""

    def check(good, values, rule, offsets=None):
        """Both arrays are `[n]`, `[n, length]`, or of all records in a row, which begin at `offsets`."""
        if good.all():
            return
        place = int(np.argmin(good))
        if offsets is None:
            row, *index = (int(number) for number in np.unravel_index(place, good.shape))
        else:
            row = int(np.searchsorted(offsets, place, side="right")) - 1
            index = [place - int(offsets[row])]
        where = f"{batch.path}, record {batch.number + row}"
        received = f"{values.reshape(-1)[place]}{f' at index {index[0]}' if index else ''}"
        raise error(f"{where}: {rule}. Received: {received}.")

    return check


def check_int32(check, name, values, *offsets):
    """Check that the values of a feature fit into an int32 column and are not negative."""
    check((values >= 0) & (values <= INT32_MAX), values, f"{name} must be in 0..{INT32_MAX}", *offsets)


def follows(good):
    """Extend a rule of neighbours, bool `[n, length - 1]`, to `[n, length]`: True for the first."""
    return np.pad(good, ((0, 0), (1, 0)), constant_values=True)


def check_slots(check, features, weights, is_split=False):
    """Check which sequence of a pack each token is of, its position in it, and which slots are used.

        input_mask    [1 1 1 2 2 0]
        position_ids  [0 1 2 0 1 0]   ->   starts [0 3], lengths [3 2], is_used [True True False]
        weights       [1 1 0]

    `weights` is the name of the slots' feature. With `is_split` the first sequence of a pack may begin at any
    position, and a pack may be empty. Returns two int64 arrays, of all sequences: where each starts among all
    tokens and padding, and its tokens; and bool `[n, K]`.
    """
    sequence_ids, positions = features[schema.INPUT_MASK], features[schema.POSITION_IDS]
    first, before, after = sequence_ids[:, 0], sequence_ids[:, :-1], sequence_ids[:, 1:]
    good = (first == 1) | ((first == 0) & is_split)
    check(good, first, f"{schema.INPUT_MASK} must begin with sequence 1")
    goes_on = (after == before) | ((before > 0) & ((after == before + 1) | (after == 0)))
    rule = f"{schema.INPUT_MASK} must count sequences 1, 2, ... and end in padding 0"
    check(follows(goes_on), sequence_ids, rule)
    depth = features[weights].shape[1]
    check(sequence_ids <= depth, sequence_ids, f"{schema.INPUT_MASK} must be at most K={depth}")
    is_real = sequence_ids > 0
    is_start = follows(after != before) & is_real
    starts = np.flatnonzero(is_start)
    lengths = np.diff(np.flatnonzero(is_start[is_real]), append=np.count_nonzero(is_real))
    # only the first sequence of a pack may have begun in another one
    may_continue = is_split & (starts % sequence_ids.shape[1] == 0)
    expected = np.zeros_like(positions)
    expected[is_real] = range_indices(np.where(may_continue, positions.reshape(-1)[starts], 0), lengths)
    rule = f"{schema.POSITION_IDS} must restart at 0 in every sequence"
    check((positions == expected) & (positions >= 0), positions, rule)
    is_used = np.arange(depth) < sequence_ids.max(axis=1)[:, None]
    check(features[weights] == is_used, features[weights], f"{weights} must be 1 per sequence, else 0")
    return starts, lengths, is_used


def find_common_objective(paths):
    """The objective that the records of all files, packed or not, are for, as `PackSpec.objective`.

    Raises `InputError` where they disagree.
    """
    found = {}
    for path in paths:
        # records without `label_mask` count as BERT's, whose readers report what is missing
        is_causal = schema.LABEL_MASK in feature_names(first_record(path), path, 1)
        found[schema.CAUSAL_LM if is_causal else schema.MLM_NSP] = path
    if len(found) > 1:
        raise InputError(f"all files must be for one objective. Received: {found}.")
    return next(iter(found))


def read_pack_spec(paths, argument="input_file", pattern=None, kinds=None):
    """Read the `schema.PackSpec` that all files of packs share, from the first record of each.

    `argument` and `pattern` are the flag and the value that name them, for the command in the message about
    unpacked files. `kinds` are `schema.PACKED_LENGTHS` or `schema.CAUSAL_LENGTHS`, None for the records' own.
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
    return ", ".join(map(str, dataclasses.astuple(spec)))
