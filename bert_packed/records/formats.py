"""Which layouts of packed records there are, and how one becomes the other.

`packed` is ours, the picture in `schema.py`. `graphcore` is that of Graphcore's BERT: every [CLS] stands
at the end of the pack, the first sequence's last, and the next-sentence slots are numbered from the end too.
The same two sequences, of lengths 4 and 3, in a pack of S=8, K=3, P=3:

    packed_input_ids             [ 7  4  3  9  3  0  2  2]   bodies, padding, [CLS] of sequences 2, 1
    packed_input_mask            [ 1  1  1  2  2  0  2  1]
    packed_segment_ids           [ 0  1  1  0  0  0  0  0]
    packed_position_ids          [ 1  2  3  1  2  0  0  0]   bodies count from 1, [CLS] is 0
    packed_masked_lm_positions   [ 1  3  0]
    packed_masked_lm_ids         [ 8  9  0]
    packed_masked_lm_mask        [ 1. 2. 0.]                 the prediction's sequence
    packed_next_sentence_labels  [ 0  0  1]                  slot K - i is sequence i's
    packed_next_sentence_mask    [ 0. 1. 1.]
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records import examples, first_records
from bert_packed.schema import GRAPHCORE, PACKED

# What both layouts have, under each one's name.
_SHARED_NAMES = {
    schema.INPUT_IDS: schema.GRAPHCORE_INPUT_IDS,
    schema.INPUT_MASK: schema.GRAPHCORE_INPUT_MASK,
    schema.SEGMENT_IDS: schema.GRAPHCORE_SEGMENT_IDS,
    schema.POSITION_IDS: schema.GRAPHCORE_POSITION_IDS,
    schema.MASKED_LM_IDS: schema.GRAPHCORE_MASKED_LM_IDS,
    schema.MASKED_LM_WEIGHTS: schema.GRAPHCORE_MASKED_LM_MASK,
}
_TOKEN_FEATURES = (schema.INPUT_IDS, schema.INPUT_MASK, schema.SEGMENT_IDS, schema.POSITION_IDS)


@dataclasses.dataclass(frozen=True)
class Format:
    """One layout of packed records.

    Attributes:
        lengths: Dict from feature name to "S", "K" or "P".
        encode: Function from arrays of our layout to arrays of this one.
        decode: The way back. It takes the arrays and a function check(good, values, rule), which raises.
    """

    lengths: dict[str, str]
    encode: Callable
    decode: Callable


def find_format(path):
    """The name of the layout of a file of packs, from the names of its first record's features."""
    names = examples.feature_names(first_records.first_record(path), path, 1)
    return GRAPHCORE if all(name in names for name in schema.GRAPHCORE_LENGTHS) else PACKED


def find_common_format(paths):
    """The layout that files of packs share; raises `InputError` where they disagree."""
    found = {find_format(path): path for path in paths}
    if len(found) > 1:
        raise InputError(f"all files of packs must have one layout. Received: {found}.")
    return next(iter(found))


def default_room(output_format, max_seq_length, depth, needed):
    """Predictions that a pack has room for, where the user asks for no number.

    Graphcore's programs expect those of one full sequence and K - 1 more, for the rounding of each. Their
    packer drops packs that need more; here nothing is dropped, and the room grows.
    """
    if output_format == GRAPHCORE:
        return max(schema.default_predictions(max_seq_length) + depth - 1, needed)
    return needed


def to_graphcore(arrays):
    """Our layout in Graphcore's: dict of arrays `[n, ...]` -> dict of arrays `[n, ...]`."""
    sequence_ids, positions = arrays[schema.INPUT_MASK], arrays[schema.POSITION_IDS]
    length = sequence_ids.shape[1]
    rows, columns = np.nonzero(sequence_ids)
    owners = sequence_ids[rows, columns]
    target = np.where(positions[rows, columns] == 0, length - owners, columns - owners)
    encoded = {}
    for name in _TOKEN_FEATURES:
        values = np.zeros_like(arrays[name])
        values[rows, target] = arrays[name][rows, columns]
        encoded[_SHARED_NAMES[name]] = values
    moved = np.zeros_like(sequence_ids)
    moved[rows, columns] = target
    is_used = arrays[schema.MASKED_LM_WEIGHTS] > 0
    places = np.take_along_axis(moved, arrays[schema.MASKED_LM_POSITIONS], axis=1)
    encoded[schema.GRAPHCORE_MASKED_LM_POSITIONS] = np.where(is_used, places, 0)
    encoded[schema.GRAPHCORE_MASKED_LM_IDS] = arrays[schema.MASKED_LM_IDS]
    encoded[schema.GRAPHCORE_MASKED_LM_MASK] = arrays[schema.MASKED_LM_WEIGHTS]
    encoded[schema.GRAPHCORE_NEXT_SENTENCE_LABELS] = arrays[schema.NEXT_SENTENCE_LABELS][:, ::-1]
    encoded[schema.GRAPHCORE_NEXT_SENTENCE_MASK] = arrays[schema.NEXT_SENTENCE_WEIGHTS][:, ::-1]
    return encoded


def from_graphcore(arrays, check):
    """Graphcore's layout in ours, as far as it can be undone; the rest of the rules are our layout's.

    Args:
        arrays: Dict of arrays `[n, ...]`.
        check: Function of (bool array of what is good, values, rule in words), which raises.

    Returns:
        Dict of arrays `[n, ...]`.
    """
    sequence_ids = arrays[schema.GRAPHCORE_INPUT_MASK]
    positions = arrays[schema.GRAPHCORE_POSITION_IDS]
    length, depth = sequence_ids.shape[1], arrays[schema.GRAPHCORE_NEXT_SENTENCE_MASK].shape[1]
    good = (sequence_ids >= 0) & (sequence_ids <= depth)
    check(good, sequence_ids, f"{schema.GRAPHCORE_INPUT_MASK} must be 0..K={depth}")
    columns = np.arange(length)
    is_real = sequence_ids > 0
    is_cls = is_real & (positions == 0)
    stands_right = ~is_cls | (columns == length - sequence_ids)
    check(stands_right, positions, f"{schema.GRAPHCORE_POSITION_IDS} must be 0 at sequence i's [CLS], S - i")
    is_body = is_real & ~is_cls
    fits = ~is_body | (columns + sequence_ids < length)
    check(fits, sequence_ids, f"{schema.GRAPHCORE_INPUT_MASK} must leave the last places to [CLS]")

    # sequence i starts behind the bodies and [CLS] of those before it
    rows, owned = np.nonzero(is_body)
    body_lengths = np.zeros((len(sequence_ids), depth + 1), np.int64)
    np.add.at(body_lengths, (rows, sequence_ids[rows, owned]), 1)
    starts = np.cumsum(body_lengths, axis=1) - body_lengths + np.arange(depth + 1) - 1
    target = np.zeros_like(sequence_ids)
    target[rows, owned] = owned + sequence_ids[rows, owned]
    rows, owned = np.nonzero(is_cls)
    target[rows, owned] = starts[rows, sequence_ids[rows, owned]]

    decoded = {}
    rows, owned = np.nonzero(is_real)
    for name in _TOKEN_FEATURES:
        source = arrays[_SHARED_NAMES[name]]
        check((source == 0) | is_real, source, f"{_SHARED_NAMES[name]} must be 0 in padding")
        decoded[name] = np.zeros_like(source)
        decoded[name][rows, target[rows, owned]] = source[rows, owned]
    decoded.update(_decode_predictions(arrays, target, is_real, check))
    decoded[schema.NEXT_SENTENCE_LABELS] = arrays[schema.GRAPHCORE_NEXT_SENTENCE_LABELS][:, ::-1]
    weights = arrays[schema.GRAPHCORE_NEXT_SENTENCE_MASK][:, ::-1]
    decoded[schema.NEXT_SENTENCE_WEIGHTS] = weights
    decoded[schema.NEXT_SENTENCE_POSITIONS] = np.where(weights > 0, starts[:, 1:], 0)
    return decoded


def _decode_predictions(arrays, target, is_real, check):
    """The features of length P, by ascending position: where a [CLS] is predicted, Graphcore's are not."""
    name = schema.GRAPHCORE_MASKED_LM_POSITIONS
    positions, ids = arrays[name], arrays[schema.GRAPHCORE_MASKED_LM_IDS]
    weights = arrays[schema.GRAPHCORE_MASKED_LM_MASK]
    check((positions >= 0) & (positions < target.shape[1]), positions, f"{name} must lie within the pack")
    is_used = weights != 0
    on_token = np.take_along_axis(is_real, positions, axis=1)
    check(on_token | ~is_used, positions, f"{name} must be of a token")
    check(is_used | (positions == 0), positions, f"{name} must be 0 where unused")
    moved = np.where(is_used, np.take_along_axis(target, positions, axis=1), 0)
    order = np.argsort(np.where(is_used, moved, target.shape[1]), axis=1, kind="stable")
    return {
        feature: np.take_along_axis(values, order, axis=1)
        for feature, values in (
            (schema.MASKED_LM_POSITIONS, moved),
            (schema.MASKED_LM_IDS, ids),
            (schema.MASKED_LM_WEIGHTS, weights),
        )
    }


FORMATS = {
    PACKED: Format(schema.PACKED_LENGTHS, lambda arrays: arrays, lambda arrays, check: arrays),
    GRAPHCORE: Format(schema.GRAPHCORE_LENGTHS, to_graphcore, from_graphcore),
}
