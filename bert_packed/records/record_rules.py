"""Rules that records of several forms share, and the errors that name the record which breaks one."""

import numpy as np

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records.sequences import range_indices

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


def check_slots(check, features, depth, is_split=False):
    """Check which sequence of a pack each token is of, and its position in it.

        input_mask    [1 1 1 2 2 0]
        position_ids  [0 1 2 0 1 0]   ->   starts [0 3], lengths [3 2]

    With `is_split` the first sequence of a pack may begin at any position, and a pack may be empty. Returns
    two int64 arrays, of all sequences: where each starts among all tokens and padding, and its tokens.
    """
    sequence_ids, positions = features[schema.INPUT_MASK], features[schema.POSITION_IDS]
    first, before, after = sequence_ids[:, 0], sequence_ids[:, :-1], sequence_ids[:, 1:]
    good = (first == 1) | ((first == 0) & is_split)
    check(good, first, f"{schema.INPUT_MASK} must begin with sequence 1")
    goes_on = (after == before) | ((before > 0) & ((after == before + 1) | (after == 0)))
    rule = f"{schema.INPUT_MASK} must count sequences 1, 2, ... and end in padding 0"
    check(follows(goes_on), sequence_ids, rule)
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
    return starts, lengths
