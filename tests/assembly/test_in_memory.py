"""Plans and packs of sequences in memory: each exactly once, unpacked again, and other packers' packs."""

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


def load_lengths():
    histogram = load_known_histogram("wikipedia_512").astype(float)
    rng = np.random.default_rng(0)
    return rng.choice(np.arange(1, 513), 300, p=histogram / histogram.sum())


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
