"""Plans and packs of sequences in memory: each exactly once, unpacked again, and other packers' packs.

This file alone catches a mistake in a call that ends in an error of NumPy's, or is taken for something else.
"""

import itertools
import subprocess
import sys

import numpy as np
import pytest

import bert_packed
from bert_packed.packing.histogram import load_known_histogram

LENGTH = 16


def random_sequences(num_sequences, seed=0, longest=LENGTH):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 1000, size).tolist() for size in rng.integers(1, longest + 1, num_sequences)]


def check_packs(packs, sequences, max_seq_length):
    """The packs hold each sequence once, contiguous, from the left, by a plain loop; their number of rows."""
    found = []
    for row in range(len(packs["input_ids"])):
        tokens, ids = packs["input_ids"][row], packs["sequence_ids"][row]
        at = 0
        for slot, index in enumerate(packs["sequence_index"][row], 1):
            if index < 0:
                assert slot not in ids
                continue
            length = len(sequences[index])
            assert tokens[at : at + length].tolist() == sequences[index]
            assert (ids[at : at + length] == slot).all()
            assert packs["position_ids"][row, at : at + length].tolist() == list(range(length))
            found.append(int(index))
            at += length
        assert at <= max_seq_length and tokens.shape == (max_seq_length,)
        for name in ("input_ids", "sequence_ids", "position_ids"):
            assert not packs[name][row, at:].any()
    assert sorted(found) == list(range(len(sequences)))
    return len(packs["input_ids"])


@pytest.mark.parametrize("depth", ["max", 3, 1])
@pytest.mark.parametrize("algorithm", ["cghp", "lpfhp"])
def test_packs_hold_each_sequence_once(depth, algorithm):
    sequences = random_sequences(200)
    packs = bert_packed.pack(sequences, LENGTH, depth, algorithm=algorithm, seed=3)
    num_packs = check_packs(packs, sequences, LENGTH)
    plan = bert_packed.plan(list(map(len, sequences)), LENGTH, depth, algorithm)
    assert num_packs == plan.num_packs and packs["sequence_index"].shape == (num_packs, plan.depth)
    assert depth == 1 or num_packs < 200  # packs hold several


def test_seed_and_algorithm_have_their_effect():
    """An argument that is checked and then left out of the call it is for would change nothing."""
    sequences, found = random_sequences(200), set()
    for arguments in ({"seed": 0}, {"seed": 1}, {"seed": 2**63 - 1}, {"algorithm": "spfhp"}):
        index, again = (bert_packed.pack(sequences, LENGTH, **arguments)["sequence_index"] for _ in "ab")
        np.testing.assert_array_equal(index, again)
        found.add(index.tobytes())
    assert len(found) == 4


def test_a_pack():
    packs = bert_packed.pack([[5, 6, 7], [8, 9]], max_seq_length=6)
    assert {name: values.tolist() for name, values in packs.items()} == {
        "input_ids": [[8, 9, 5, 6, 7, 0]],
        "sequence_ids": [[1, 1, 2, 2, 2, 0]],
        "position_ids": [[0, 1, 0, 1, 2, 0]],
        "sequence_index": [[1, 0]],
    }


def test_columns_go_with_their_tokens_and_sequences():
    sequences = random_sequences(50)
    columns = {
        "input_ids": sequences,
        "labels": [[token + 1 for token in one] for one in sequences],
        "weights": [np.linspace(0, 1, len(one), dtype=np.float32) for one in sequences],
        "kind": list(range(50)),
        "score": [number / 7 for number in range(50)],
        "attention_mask": [[1] * len(one) for one in sequences],
    }
    packs = bert_packed.pack(columns, LENGTH, padding={"labels": -100, "kind": -7})
    check_packs(packs, sequences, LENGTH)
    is_token, is_used = packs["sequence_ids"] > 0, packs["sequence_index"] >= 0
    assert (packs["labels"] == np.where(is_token, packs["input_ids"] + 1, -100)).all()
    assert (packs["kind"] == np.where(is_used, packs["sequence_index"], -7)).all()
    assert packs["weights"].dtype == np.float32 and "attention_mask" not in packs
    again = bert_packed.unpack(packs)
    assert again.keys() == columns.keys() - {"attention_mask"}
    for name, found in again.items():
        for one, want in zip(found, columns[name], strict=True):
            assert np.array_equal(one, want)
    assert all(isinstance(one, np.ndarray) for one in bert_packed.unpack(bert_packed.pack(sequences, LENGTH)))


@pytest.mark.parametrize("depth", ["max", 4])
@pytest.mark.parametrize("buffer", [1, 30, 10_000])
def test_a_stream_is_packed_with_few_in_memory(depth, buffer):
    sequences = random_sequences(600, longest=8)
    taken = itertools.count()
    stream = ({"input_ids": one, "kind": number} for number, one in enumerate(sequences) if next(taken) >= 0)
    parts, found = [], []
    for packs in bert_packed.pack_stream(stream, 8, depth, buffer=buffer):
        parts.append(packs)
        index = np.sort(packs["sequence_index"][packs["sequence_index"] >= 0])
        again = bert_packed.unpack(packs)
        assert [one.tolist() for one in again["input_ids"]] == [sequences[one] for one in index]
        assert [int(one) for one in again["kind"]] == index.tolist()
        assert depth == "max" or packs["sequence_index"].shape[1] == 4
        found += index.tolist()
        # The buffer waits at most, and the part of the stream that was read at once
        assert next(taken) - len(found) <= 2 * buffer + len(parts)
    assert sorted(found) == list(range(600))
    assert len(parts) > 1 or buffer == 10_000


def test_packs_of_others_are_verified():
    histogram = load_known_histogram("wikipedia_512").astype(float)
    rng = np.random.default_rng(0)
    lengths = rng.choice(np.arange(1, 513), 300, p=histogram / histogram.sum())
    plan = bert_packed.plan(lengths, 512)
    # A plain loop packs first-fit decreasing, as lists of indices
    packs, rooms = [], []
    for index in np.argsort(-lengths, kind="stable").tolist():
        for number, room in enumerate(rooms):
            if lengths[index] <= room:
                packs[number].append(index)
                rooms[number] -= lengths[index]
                break
        else:
            packs.append([index])
            rooms.append(512 - lengths[index])
    found = bert_packed.verify_plan([set(packs[0]), *packs[1:]], lengths, 512)
    assert found.num_packs == len(packs) and found.efficiency == lengths.sum() / (512 * len(packs))
    # The bound is the best that is known, rather than that of the plan that is verified
    assert found.certificate.lower_bound == plan.certificate.lower_bound
    assert found.certificate.gap >= plan.certificate.gap
    made = bert_packed.pack([[1] * length for length in lengths], 512)
    assert bert_packed.verify_plan(made, lengths, 512).strategies == plan.strategies


@pytest.mark.parametrize("num", [0, 8, 16])
def test_packs_as_deep_as_they_are_long_are_unpacked(num):
    """K differs from S, or columns of sequences would be taken for those of tokens."""
    columns = {"input_ids": [[number + 1] for number in range(num)], "kind": list(range(num))}
    packs = bert_packed.pack(columns, 8)
    assert packs["input_ids"].shape == (num // 8, 8) and packs["sequence_ids"].shape == (num // 8, 8)
    assert packs["sequence_index"].shape == (num // 8, 9 if num else 0)
    again = bert_packed.unpack(packs)
    assert [one.tolist() for one in again["input_ids"]] == columns["input_ids"]
    assert [int(one) for one in again["kind"]] == columns["kind"]
    stream = ({"input_ids": [1, 2], "kind": number} for number in range(4))  # a single pack, at the end
    (packs,) = bert_packed.pack_stream(stream, 8, 100)
    assert packs["sequence_index"].shape[1] == 9  # not 100: a pack holds 8 at most
    assert sorted(map(int, bert_packed.unpack(packs)["kind"])) == list(range(4))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "uint64", "float16", "float64"])
def test_columns_keep_their_types(dtype):
    values = [np.array([1, 0, 1], dtype), np.array([1, 1], dtype)]
    packs = bert_packed.pack({"input_ids": [[5, 6, 7], [8, 9]], "y": values}, 6)
    assert packs["y"].dtype == dtype and packs["y"].astype(float).tolist() == [[1, 1, 1, 0, 1, 0]]
    for one, want in zip(bert_packed.unpack(packs)["y"], values, strict=True):
        assert one.dtype == dtype and (one == want).all()
    if dtype in ("uint8", "int8"):
        packs = bert_packed.pack({"input_ids": [[5, 6, 7], [8, 9]], "y": values}, 6, padding={"y": -300})
        assert packs["y"].dtype == np.int16 and packs["y"][0, -1] == -300


def test_the_api_imports_no_backend():
    program = """
import sys
import bert_packed
heavy = ["tensorflow", "keras", "jax", "torch", "scipy", "matplotlib"]
assert not {"numpy", *heavy} & sys.modules.keys()
sys.modules |= dict.fromkeys(heavy)  # an import of them fails
packs = bert_packed.pack([[5, 6, 7], [8, 9]], 6)
bert_packed.verify_plan(packs, [3, 2], 6)
bert_packed.unpack(packs)
bert_packed.attention_mask(packs["sequence_ids"])
next(bert_packed.pack_stream([[1]], 6))
assert bert_packed.audit_model(lambda batch: batch["input_ids"] * 2, packs).passed
assert set(bert_packed.__all__) <= set(dir(bert_packed))
try:
    bert_packed.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "module 'bert_packed' has no attribute 'nothing'\n"


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
    """Masked values are not taken for others."""
    with pytest.raises(ValueError, match=r"^[^\n]* Received[^\n]*\.$"):
        read(wrong)
