"""Plans and packs of sequences in memory: each exactly once, unpacked again, and other packers' packs."""

import itertools
import re
import subprocess
import sys

import numpy as np
import pytest

import bert_packed
from bert_packed.core.settings import InputError
from bert_packed.packing.histogram import load_known_histogram
from bert_packed.packing.plan import make_plan

LENGTH = 16
ONES = (
    "sequence 0: attention_mask must be 1 at every token, since a sequence is one and without padding. "
    "Received: {}."
)
WHOLE = "`packs`: pack {} must be a list of whole numbers. Received: {}."


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


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("seed", (0, 1, 2**63 - 1)),
        ("max_sequences_per_pack", ("max", 2, 1)),
        ("algorithm", ("cghp", "spfhp")),
    ],
)
def test_each_argument_of_packing_has_its_effect(name, values):
    """An argument that is checked and then left out of the call it is for would change nothing."""
    sequences, found = random_sequences(200), set()
    for value in values:
        index, again = (bert_packed.pack(sequences, LENGTH, **{name: value})["sequence_index"] for _ in "ab")
        np.testing.assert_array_equal(index, again)
        found.add(index.tobytes())
    assert len(found) == len(values)


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
    for name in again:
        assert [np.asarray(one).tolist() for one in again[name]] == [
            np.asarray(one).tolist() for one in columns[name]
        ]
    assert all(isinstance(one, np.ndarray) for one in bert_packed.unpack(bert_packed.pack(sequences, LENGTH)))


def test_outputs_of_a_model_are_unpacked():
    sequences = random_sequences(20)
    packs = bert_packed.pack(sequences, LENGTH)
    states = np.repeat(packs["input_ids"][..., None], 3, axis=2) * np.array([1, 10, 100])
    found = bert_packed.unpack({**packs, "states": states})["states"]
    assert all(
        (one[:, 1] == 10 * np.array(tokens)).all() for one, tokens in zip(found, sequences, strict=True)
    )


@pytest.mark.parametrize("depth", ["max", 4])
@pytest.mark.parametrize("buffer", [1, 30, 10_000])
def test_a_stream_is_packed_with_few_in_memory(depth, buffer):
    sequences = random_sequences(2500, longest=8)
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
        # At most the buffer waits, and the part of the stream that was read at once
        assert next(taken) - len(found) <= 2 * buffer + len(parts)
    assert sorted(found) == list(range(2500))
    assert len(parts) > 1 or buffer == 10_000


def test_packs_of_others_are_verified():
    lengths = load_lengths()
    plan = bert_packed.plan(lengths, 512)
    # First-fit decreasing by a plain loop, as lists of indices
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
    # The bound is the best that is known, not that of the plan that is verified
    assert found.certificate.lower_bound == plan.certificate.lower_bound
    assert found.certificate.gap >= plan.certificate.gap
    made = bert_packed.pack([[1] * length for length in lengths], 512)
    assert bert_packed.verify_plan(made, lengths, 512).strategies == plan.strategies


def test_packs_of_others_are_proven_by_our_own_plan():
    """Bounds that cost nothing say 5 packs here; the dual values of our plan say 6."""
    lengths = [2, 3, 4, 4, 6, 8, 11, 13, 13]
    given = bert_packed.pack([[1] * length for length in lengths], 14, 2)
    certificate = bert_packed.verify_plan(given, lengths, 14, 2).certificate
    assert (certificate.lower_bound, certificate.gap) == (6, 0)
    assert make_plan("given", 14, 2, [((length,), 1) for length in lengths]).certificate.lower_bound == 5


def load_lengths():
    histogram = load_known_histogram("wikipedia_512").astype(float)
    rng = np.random.default_rng(0)
    return rng.choice(np.arange(1, 513), 300, p=histogram / histogram.sum())


@pytest.mark.parametrize(
    "packs, depth, message",
    [
        ([[0, 1]], "max", "`packs` must hold sequence 2 once. Received: 0 times."),
        ([[0, 1], [2], [1]], "max", "`packs` must hold sequence 1 once. Received: 2 times."),
        ([[0, 0], [1], [2]], "max", "`packs` must hold sequence 0 once. Received: 2 times."),
        ([[0, 2], [1]], "max", "`packs`: pack 0 must hold at most 8 tokens. Received: 9."),
        ([[0, 1], [2]], 1, "`packs`: pack 0 must hold 1 sequence, and at most 1. Received: 2."),
        ([[0, 1], [2], []], "max", "`packs`: pack 2 must hold 1 sequence, and at most 8. Received: 0."),
        ([[0, 1], [3]], "max", "`packs`: pack 1 must hold indices from 0 and below 3. Received: [3]."),
        ([[0, 1], [-1]], "max", "`packs`: pack 1 must hold indices from 0 and below 3. Received: [-1]."),
        ([[0, 1], [2**70]], "max", WHOLE.format(1, [2**70])),
        ([[0, 1.0]], "max", WHOLE.format(0, [0, 1.0])),
        ([[True, False]], "max", WHOLE.format(0, [True, False])),
        ([["0"]], "max", WHOLE.format(0, ["0"])),
        ([[[0, 1]]], "max", WHOLE.format(0, [[0, 1]])),
        ([0, 1], "max", WHOLE.format(0, 0)),
    ],
)
def test_packs_of_others_that_are_wrong(packs, depth, message):
    with pytest.raises(ValueError) as error:
        bert_packed.verify_plan(packs, [3, 5, 6], 8, depth)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "sequences, options, message",
    [
        ([[1], []], {}, "sequence 1: input_ids must be a list of one token id or more. Received: []."),
        ([[1], [1] * 9], {}, "sequence 1 must have at most max_seq_length=8 tokens. Received: 9."),
        ([1, 2], {}, "sequence 0: input_ids must be a list of one token id or more. Received: 1."),
        ([[1], ["a"]], {}, "sequence 1: input_ids must be a list of numbers, or one. Received: ['a']."),
        (
            [[1], [[1], [2]]],
            {},
            "sequence 1: input_ids must be a list of numbers, or one. Received: [[1], [2]].",
        ),
        ({"labels": [[1]]}, {}, "`sequences` must have a column input_ids. Received: labels."),
        (
            {"input_ids": [[1]], "position_ids": [[0]]},
            {},
            "`sequences` must not have columns sequence_ids, position_ids, sequence_index, lengths, which "
            "packing uses. Received: position_ids.",
        ),
        (
            {"input_ids": [[1], [2]], "labels": [[1]]},
            {},
            "every column must have 2 entries, as input_ids. Received: labels with 1.",
        ),
        (
            {"input_ids": [[1, 2]], "labels": [[1]]},
            {},
            "sequence 0: labels must have a value for each of its 2 tokens, or a single one. Received: 1.",
        ),
        (
            {"input_ids": [[1], [2]], "y": [[1], 2]},
            {},
            "sequence 1: y must be a list in every sequence, or in none. Received: 2.",
        ),
        ({"input_ids": [[1, 0]], "attention_mask": [[1, 0]]}, {}, ONES.format([1, 0])),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 2]]}, {}, ONES.format([1, 2])),  # axolotl's numbers
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 0.5]]}, {}, ONES.format([1.0, 0.5])),
        ({"input_ids": [[1, 2]], "attention_mask": [[np.nan, 1]]}, {}, ONES.format([np.nan, 1.0])),
        (
            [[1]],
            {"padding": {"labels": 1}},
            "`padding` must be for columns of the sequences. Received: labels.",
        ),
        ([[1.5]], {}, "sequence 0: input_ids must be a list of one token id or more. Received: [1.5]."),
        ([[True]], {}, "sequence 0: input_ids must be a list of one token id or more. Received: [True]."),
        (None, {}, "`sequences` must have a list of entries in input_ids. Received: None."),
        ({"input_ids": [[1]], "y": 5}, {}, "`sequences` must have a list of entries in y. Received: 5."),
        ([[1]], {"padding": {"input_ids": "x"}}, "`padding` of input_ids must be a number that fits int64."),
        ([[1]], {"padding": {"input_ids": 0.5}}, "`padding` of input_ids must be a number that fits int64."),
        ([[1]], {"padding": {1: 0, "y": 0}}, "`padding` must be for columns of the sequences. Received: 1."),
        ({"input_ids": [[1]], "y": np.array(5)}, {}, "`sequences` must have a list of entries in y."),
        ([[1]], {"padding": ["y"]}, "`padding` must be a dict from column to value. Received: ['y']."),
        ([[1]], {"seed": -1}, "`seed` must be a whole number from 0 to 9,223,372,036,854,775,807."),
        ([[1]], {"seed": np.arange(2)}, "`seed` must be a whole number from 0 to"),
        ([[1]], {"algorithm": "best"}, "`algorithm` must be one of cghp, "),
        ([[1]], {"algorithm": []}, "`algorithm` must be one of cghp, "),
        ([[1]], {"max_sequences_per_pack": np.arange(2)}, "`max_sequences_per_pack` must be a whole number"),
        (
            [[1]],
            {"max_sequences_per_pack": 0},
            '`max_sequences_per_pack` must be a whole number of at least 1, or "max". Received: 0.',
        ),
    ],
)
def test_mistakes(sequences, options, message):
    with pytest.raises(ValueError) as error:
        bert_packed.pack(sequences, 8, **options)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


PACKS = bert_packed.pack([[5, 6, 7], [8, 9]], 6)
READERS = {
    "plan": lambda wrong: bert_packed.plan(wrong, 8),
    "pack": lambda wrong: bert_packed.pack([[1, 2], wrong], 8),
    "pack: a column": lambda wrong: bert_packed.pack({"input_ids": [[1], [2, 3]], "y": [[1], wrong]}, 8),
    "pack: padding": lambda wrong: bert_packed.pack([[1]], 8, padding={"input_ids": wrong}),
    "pack_stream": lambda wrong: list(bert_packed.pack_stream([[1], wrong], 8)),
    "unpack": bert_packed.unpack,
    "unpack: a column": lambda wrong: bert_packed.unpack({**PACKS, "y": wrong}),
    "unpack: sequence_ids": lambda wrong: bert_packed.unpack({**PACKS, "sequence_ids": wrong}),
    "unpack: sequence_index": lambda wrong: bert_packed.unpack({**PACKS, "sequence_index": wrong}),
    "verify_plan": lambda wrong: bert_packed.verify_plan([wrong, [0]], [3, 2], 6),
    "verify_plan: lengths": lambda wrong: bert_packed.verify_plan([[1, 0]], wrong, 6),
    "verify_plan: sequence_index": lambda wrong: bert_packed.verify_plan(
        {**PACKS, "sequence_index": wrong}, [3, 2], 6
    ),
    "attention_mask": bert_packed.attention_mask,
    "audit_model: packs": lambda wrong: bert_packed.audit_model(len, wrong),
    "audit_model: a column": lambda wrong: bert_packed.audit_model(len, {**PACKS, "input_ids": wrong}),
    "audit_model: outputs": lambda wrong: bert_packed.audit_model(lambda batch: wrong, PACKS),
}


class Unreadable:
    """Has no values, but a `repr` of two lines."""

    def __repr__(self):
        return "no\nvalues"


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "abc",
        [[1], [2, 3]],
        [1, None],
        [1, 1j],
        np.ma.array([1, 2], mask=[False, True]),
        [np.ma.array([1, 2], mask=[False, True]), [3, 4]],
        np.array([["a"], ["b"]]),
        Unreadable(),
    ],
    ids=["None", "text", "ragged", "objects", "complex", "masked", "masked rows", "texts", "unreadable"],
)
def test_what_is_no_array_of_numbers(read, wrong):
    """No public function ends in an error of NumPy's or takes masked values for others."""
    with pytest.raises(ValueError, match=r"^[^\n]* Received[^\n]*\.$"):
        read(wrong)


def test_mistakes_of_a_stream_name_its_sequence():
    good = {"input_ids": [1, 2], "y": 1}
    for wrong, message in [
        ({"input_ids": [1]}, "sequence 1500 must have the columns input_ids, y."),
        ({"input_ids": [1] * 9, "y": 1}, "sequence 1500 must have at most max_seq_length=8 tokens."),
        ({"input_ids": [1], "y": [2]}, "sequence 1500: y must be a list in every sequence, or in none."),
        ([1], "sequence 1500 must have the columns input_ids, y. Received: [1]."),
    ]:
        with pytest.raises(InputError) as error:
            list(bert_packed.pack_stream([good] * 1500 + [wrong], 8))
        assert str(error.value).startswith(message)


def test_packs_of_our_own_must_agree_with_the_lengths():
    packs = bert_packed.pack([[5, 6, 7], [8, 9]], 6)
    with pytest.raises(InputError, match="`packs`: sequence 1 must have 3 tokens, as in `lengths`"):
        bert_packed.verify_plan(packs, [3, 3], 6)
    with pytest.raises(InputError, match="`packs` must have sequence_index"):
        bert_packed.verify_plan({"sequence_ids": packs["sequence_ids"]}, [3, 2], 6)


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
    stream = ({"input_ids": [1, 2], "kind": number} for number in range(5))
    (packs,) = bert_packed.pack_stream(stream, 8, 100)
    assert packs["sequence_index"].shape[1] == 9  # not 100: a pack holds 8 at most
    assert sorted(map(int, bert_packed.unpack(packs)["kind"])) == list(range(5))


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


def test_arguments_of_a_stream_are_checked_at_once():
    for arguments, message in [
        ({"buffer": 0}, "`buffer` must be a whole number from 1. Received: 0."),
        ({"sequences": None}, "`sequences` must be an iterable of lists, or of dicts. Received: None."),
        ({"max_seq_length": 0}, "`max_seq_length` must be a whole number"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            bert_packed.pack_stream(**{"sequences": [], "max_seq_length": 8, **arguments})


def test_wrong_packs_are_not_unpacked():
    packs = bert_packed.pack([[5, 6, 7], [8, 9]], 6)
    for wrong, message in [
        ({"input_ids": packs["input_ids"]}, "`packs` must have sequence_ids"),
        ({**packs, "sequence_index": np.array([[1, -1]])}, "`packs` must have sequence_ids 1, 2"),
        (
            {**packs, "sequence_index": np.array([[1, 1]])},
            "`packs` must have each sequence once in sequence_index.",
        ),
        (
            {**packs, "sequence_ids": np.array([[2, 2, 1, 1, 1, 0]])},
            "`packs` must have sequence_ids 1, 2",
        ),
        (
            {**packs, "sequence_ids": np.array([[1, 1, 3, 3, 3, 0]])},
            "`packs` must have sequence_ids 1, 2",
        ),
        (
            {**packs, "sequence_ids": packs["sequence_ids"] / 1},
            "`packs`: sequence_ids must be whole numbers [B, S].",
        ),
        ({**packs, "sequence_index": np.array([1, 0])}, "`packs`: sequence_index must be whole numbers"),
        ({**packs, "sequence_index": np.zeros((2, 2), int)}, "`packs` must have sequence_ids 1, 2"),
        ({**packs, "y": np.zeros((1, 3))}, "every column of `packs` must begin with [1, 6] or [1, 2]."),
    ]:
        with pytest.raises(ValueError) as error:
            bert_packed.unpack(wrong)
        assert str(error.value).startswith(message)


def test_the_face_of_the_library_costs_no_backend():
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
