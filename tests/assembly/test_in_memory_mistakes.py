"""A mistake in a call of the library that ends in an error of NumPy's, or is taken for something else."""

import numpy as np
import pytest

import bert_packed

PACKS = bert_packed.pack([[5, 6, 7], [8, 9]], 6)
LENGTHS = [3, 5, 6]
ONES = "sequence 0: attention_mask must be 1 at every token, since a sequence is one and without padding."
ONE_ID = "sequence {}: input_ids must be a list of one token id or more. Received: {}."
NUMBERS = "sequence 1: input_ids must be a list of numbers, or one. Received: {}."
WHOLE = "`packs`: pack {} must be a list of whole numbers. Received: {}."
COLUMNS = (
    "`sequences` must not have columns sequence_ids, position_ids, sequence_index, lengths, which packing"
)
GOOD = {"input_ids": [1, 2], "y": 1}


def pack(sequences, **options):
    return bert_packed.pack(sequences, 8, **options)


def masked(mask):
    return pack({"input_ids": [[1] * len(mask)], "attention_mask": [mask]})


def verify(packs, depth="max"):
    return bert_packed.verify_plan(packs, LENGTHS, 8, depth)


def verify_ours(changes, lengths=(3, 2)):
    return bert_packed.verify_plan(PACKS | changes, list(lengths), 6)


def unpack(changes, *left_out):
    return bert_packed.unpack({name: its for name, its in (PACKS | changes).items() if name not in left_out})


def stream(last):
    return list(bert_packed.pack_stream([GOOD] * 1500 + [last], 8))


def begin_stream(sequences=(), max_seq_length=8, **settings):
    return bert_packed.pack_stream(sequences, max_seq_length, **settings)


def index(values):
    return {"sequence_index": np.array(values)}


def ids(values):
    return {"sequence_ids": np.array([values])}


MISTAKES = [
    (pack, ([[1], []],), {}, ONE_ID.format(1, [])),
    (pack, ([1, 2],), {}, ONE_ID.format(0, 1)),
    (pack, ([[1.5]],), {}, ONE_ID.format(0, [1.5])),
    (pack, ([[True]],), {}, ONE_ID.format(0, [True])),
    (pack, ([[1], [1] * 9],), {}, "sequence 1 must have at most max_seq_length=8 tokens. Received: 9."),
    (pack, ([[1], ["a"]],), {}, NUMBERS.format(["a"])),
    (pack, ([[1], [[1], [2]]],), {}, NUMBERS.format([[1], [2]])),
    (pack, (None,), {}, "`sequences` must have a list of entries in input_ids. Received: None."),
    (pack, ({"labels": [[1]]},), {}, "`sequences` must have a column input_ids. Received: labels."),
    (pack, ({"input_ids": [[1]], "position_ids": [[0]]},), {}, COLUMNS),
    (pack, ({"input_ids": [[1], [2]], "y": [[1]]},), {}, "every column must have 2 entries, as input_ids."),
    (pack, ({"input_ids": [[1, 2]], "y": [[1]]},), {}, "sequence 0: y must have a value for each of its 2"),
    (pack, ({"input_ids": [[1], [2]], "y": [[1], 2]},), {}, "sequence 1: y must be a list in every sequence"),
    (pack, ({"input_ids": [[1]], "y": 5},), {}, "`sequences` must have a list of entries in y. Received: 5."),
    (pack, ({"input_ids": [[1]], "y": np.array(5)},), {}, "`sequences` must have a list of entries in y."),
    *((masked, (mask,), {}, ONES) for mask in ([1, 0], [1, 2], [1, 0.5], [np.nan, 1])),  # 2 is axolotl's
    (pack, ([[1]],), {"padding": {"y": 1}}, "`padding` must be for columns of the sequences. Received: y."),
    (pack, ([[1]],), {"padding": {"input_ids": 0.5}}, "`padding` of input_ids must be a number that fits"),
    (pack, ([[1]],), {"padding": ["y"]}, "`padding` must be a dict from column to value. Received: ['y']."),
    (pack, ([[1]],), {"seed": -1}, "`seed` must be a whole number from 0 to 9,223,372,036,854,775,807."),
    (pack, ([[1]],), {"seed": np.arange(2)}, "`seed` must be a whole number from 0 to"),
    (pack, ([[1]],), {"algorithm": "best"}, "`algorithm` must be one of cghp, "),
    (pack, ([[1]],), {"algorithm": []}, "`algorithm` must be one of cghp, "),
    (pack, ([[1]],), {"max_sequences_per_pack": np.arange(2)}, "`max_sequences_per_pack` must be a whole"),
    (pack, ([[1]],), {"max_sequences_per_pack": 0}, "`max_sequences_per_pack` must be a whole number of at"),
    (verify, ([[0, 1]],), {}, "`packs` must hold sequence 2 once. Received: 0 times."),
    (verify, ([[0, 1], [2], [1]],), {}, "`packs` must hold sequence 1 once. Received: 2 times."),
    (verify, ([[0, 0], [1], [2]],), {}, "`packs` must hold sequence 0 once. Received: 2 times."),
    (verify, ([[0, 2], [1]],), {}, "`packs`: pack 0 must hold at most 8 tokens. Received: 9."),
    (verify, ([[0, 1], [2]], 1), {}, "`packs`: pack 0 must hold 1 sequence, and at most 1. Received: 2."),
    (verify, ([[0, 1], [2], []],), {}, "`packs`: pack 2 must hold 1 sequence, and at most 8. Received: 0."),
    (verify, ([[0, 1], [3]],), {}, "`packs`: pack 1 must hold indices from 0 and below 3. Received: [3]."),
    (verify, ([[0, 1], [-1]],), {}, "`packs`: pack 1 must hold indices from 0 and below 3. Received: [-1]."),
    (verify, ([[0, 1], [2**70]],), {}, WHOLE.format(1, [2**70])),
    *((verify, ([wrong],), {}, WHOLE.format(0, wrong)) for wrong in ([0, 1.0], [True], ["0"], [[0, 1]], 0)),
    (verify_ours, ({}, (3, 3)), {}, "`packs`: sequence 1 must have 3 tokens, as in `lengths`"),
    (unpack, ({}, "sequence_ids"), {}, "`packs` must have sequence_ids"),
    (unpack, (index([[1, -1]]),), {}, "`packs` must have sequence_ids 1, 2"),
    (unpack, (index([[1, 1]]),), {}, "`packs` must have each sequence once in sequence_index."),
    (unpack, (index([1, 0]),), {}, "`packs`: sequence_index must be whole numbers"),
    (unpack, (index([[0, 0], [0, 0]]),), {}, "`packs` must have sequence_ids 1, 2"),
    (unpack, (ids([2, 2, 1, 1, 1, 0]),), {}, "`packs` must have sequence_ids 1, 2"),
    (unpack, (ids([1, 1, 3, 3, 3, 0]),), {}, "`packs` must have sequence_ids 1, 2"),
    (unpack, (ids([1.0, 1, 2, 2, 2, 0]),), {}, "`packs`: sequence_ids must be whole numbers [B, S]."),
    (unpack, ({"y": np.zeros((1, 3))},), {}, "every column of `packs` must begin with [1, 6] or [1, 2]."),
    (stream, ({"input_ids": [1]},), {}, "sequence 1500 must have the columns input_ids, y."),
    (stream, ([1],), {}, "sequence 1500 must have the columns input_ids, y. Received: [1]."),
    (stream, ({"input_ids": [1] * 9, "y": 1},), {}, "sequence 1500 must have at most max_seq_length=8"),
    (stream, ({"input_ids": [1], "y": [2]},), {}, "sequence 1500: y must be a list in every sequence, or in"),
    (begin_stream, (), {"buffer": 0}, "`buffer` must be a whole number from 1. Received: 0."),
    (begin_stream, (None,), {}, "`sequences` must be an iterable of lists, or of dicts. Received: None."),
    (begin_stream, ((), 0), {}, "`max_seq_length` must be a whole number"),
]


@pytest.mark.parametrize(("function", "arguments", "settings", "message"), MISTAKES)
def test_a_mistake_in_a_call_is_one_line(function, arguments, settings, message):
    with pytest.raises(ValueError) as error:
        function(*arguments, **settings)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


READERS = {
    "plan": lambda wrong: bert_packed.plan(wrong, 8),
    "pack": lambda wrong: pack([[1, 2], wrong]),
    "pack: a column": lambda wrong: pack({"input_ids": [[1], [2, 3]], "y": [[1], wrong]}),
    "pack: padding": lambda wrong: pack([[1]], padding={"input_ids": wrong}),
    "pack_stream": lambda wrong: list(bert_packed.pack_stream([[1], wrong], 8)),
    "unpack": bert_packed.unpack,
    "unpack: a column": lambda wrong: unpack({"y": wrong}),
    "unpack: sequence_ids": lambda wrong: unpack({"sequence_ids": wrong}),
    "unpack: sequence_index": lambda wrong: unpack({"sequence_index": wrong}),
    "verify_plan": lambda wrong: bert_packed.verify_plan([wrong, [0]], [3, 2], 6),
    "verify_plan: lengths": lambda wrong: bert_packed.verify_plan([[1, 0]], wrong, 6),
    "verify_plan: sequence_index": lambda wrong: verify_ours({"sequence_index": wrong}),
    "attention_mask": bert_packed.attention_mask,
    "audit_model: packs": lambda wrong: bert_packed.audit_model(len, wrong),
    "audit_model: a column": lambda wrong: bert_packed.audit_model(len, PACKS | {"input_ids": wrong}),
    "audit_model: outputs": lambda wrong: bert_packed.audit_model(lambda batch: wrong, PACKS),
}


class Unreadable:
    """Has no values, but a `repr` of two lines."""

    def __repr__(self):
        return "no\nvalues"


MASKED = np.ma.array([1, 2], mask=[False, True])
WRONG = {
    "None": None,
    "text": "abc",
    "ragged": [[1], [2, 3]],
    "objects": [1, None],
    "complex": [1, 1j],
    "masked": MASKED,
    "masked rows": [MASKED, [3, 4]],
    "texts": np.array([["a"], ["b"]]),
    "unreadable": Unreadable(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_no_array_of_numbers(read, wrong):
    """No masked values are taken for others."""
    with pytest.raises(ValueError, match=r"^[^\n]* Received[^\n]*\.$"):
        read(wrong)
