"""Packs that are not what their inputs were are found, by sums of digests in little memory."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from causal_files import make_sequences, read_examples, write_sequences
from unpacked_records import PREDICTIONS, make_features, read_records, write_features

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records import tfrecords
from bert_packed.records.read_bert import read_packed
from data_gen import verification
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.verification import BucketSums, compare_files, find_buckets, hold, unmatched

S = 12
NUM_ROWS = 3
LENGTHS = np.random.default_rng(7).integers(2, S + 1, 40).tolist()
SEQUENCES = make_sequences(LENGTHS, vocab_size=40)  # so that id 0 is the label of some token
LARGEST = SEQUENCES[2][schema.LABEL_IDS][-1] = 50  # of a piece that continues: no token has it
INPUTS = {"bert": "bert", "causal": "causal", "rows": "causal"}  # of each kind of packs


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Inputs of both objectives, and a folder of packs of each kind."""
    folder = tmp_path_factory.mktemp("made")
    features = make_features(LENGTHS, S)
    # every sequence has a prediction at position 1, so that each fault below has one to hit
    for name, value in zip(PREDICTIONS, (1, 9, 1), strict=True):
        features[name][:] = [value, 0, 0, 0]
    write_features(folder / "bert.tfrecord", features)
    write_sequences(folder / "causal.tfrecord", SEQUENCES)
    for kind, name in INPUTS.items():
        split = {"split_sequences": True, "num_rows": NUM_ROWS} if kind == "rows" else {}
        given = {"max_seq_length": S, "num_workers": 1, "num_shards": 2, **split}
        pack(PackConfig(f"{folder}/{name}.tfrecord", f"{folder}/{kind}", **given))
    return folder


def files_of(folder):
    return [str(path) for path in sorted(Path(folder).glob("packed-*.tfrecord"))]


def compare(made, kind, folder, overlong="error"):
    return compare_files([f"{made}/{INPUTS[kind]}.tfrecord"], files_of(folder), overlong)


@pytest.fixture
def damage(made, tmp_path):
    """Function that changes the packs of one kind, and compares them with the inputs."""

    def change_and_compare(kind, change):
        folder = Path(shutil.copytree(made / kind, tmp_path / kind))
        first, second = files_of(folder)
        packs, num_first = read_examples([first, second]), len(read_examples([first]))
        change(packs)
        write_sequences(first, packs[:num_first])
        write_sequences(second, packs[num_first:])
        return compare(made, kind, folder)

    return change_and_compare


def as_they_are(packs):
    pass


def reverse(packs):
    packs.reverse()


@pytest.mark.parametrize(("kind", "change"), [("bert", reverse), ("causal", reverse), ("rows", as_they_are)])
def test_good_packs_are_equal(made, damage, kind, change):
    result = compare(made, kind, made / kind)
    assert result.is_good and result.num_input_sequences == result.num_packed_sequences == len(LENGTHS)
    result = damage(kind, change)
    assert result.is_equal and result.is_good == (
        change is as_they_are
    )  # other checksums than the manifest's


def first_full(packs):
    """The first pack of two sequences or more."""
    return next(packed for packed in packs if 2 in packed[schema.INPUT_MASK])


def flip(name, place=0):
    """A fault: another value, where 0 and 1 become each other."""

    def change(packs):
        first_full(packs)[name][place] ^= 1

    return change


def drop_last_prediction(packs):
    packed = first_full(packs)
    last = np.count_nonzero(packed[schema.MASKED_LM_WEIGHTS]) - 1
    for name in PREDICTIONS:
        packed[name][last] = 0


def swap_tokens(packs):
    packed = first_full(packs)
    tokens, second = packed[schema.INPUT_IDS], packed[schema.INPUT_MASK].index(2)
    tokens[0], tokens[second] = tokens[second], tokens[0]


def forget_a_slot(packs):
    first_full(packs)[schema.NEXT_SENTENCE_WEIGHTS][1] = 0


def repeat_a_pack(packs):
    packs[-1] = packs[0]


def label_across_a_boundary(packs):
    """The mistake of a packer that shifts the pack rather than each sequence."""
    for packed in packs:
        end = packed[schema.INPUT_MASK].count(1)
        if 2 in packed[schema.INPUT_MASK] and not packed[schema.LABEL_MASK][end - 1]:
            packed[schema.LABEL_IDS][end - 1] = packed[schema.INPUT_IDS][end]
            packed[schema.LABEL_MASK][end - 1] = 1
            return


def drop_a_label(packs):
    place = packs[1][schema.LABEL_MASK].index(1)
    packs[1][schema.LABEL_IDS][place] = packs[1][schema.LABEL_MASK][place] = 0


def drop_a_label_of_id_0(packs):
    """0 is a token like others; only the mask says that there was a label."""
    for packed in packs:
        for place, label in enumerate(packed[schema.LABEL_IDS]):
            if label == 0 and packed[schema.LABEL_MASK][place]:
                packed[schema.LABEL_MASK][place] = 0
                return


def drop_the_last_sequence(packs):
    packed = first_full(packs[::-1])
    slot = max(packed[schema.INPUT_MASK])
    first = packed[schema.INPUT_MASK].index(slot)
    for values in packed.values():
        if len(values) == S:
            values[first:] = [0] * (S - first)
    packed[schema.SEQUENCE_WEIGHTS][slot - 1] = packed[schema.SEQUENCE_BYTES][slot - 1] = 0


def count_bytes_twice(packs):
    packed = next(p for p in packs if p[schema.SEQUENCE_BYTES][0])
    packed[schema.SEQUENCE_BYTES][0] *= 2


def change_a_token(packs):
    """Change a token and the label before it, so that the pack is well formed."""
    packed = next(p for p in packs if p[schema.LABEL_MASK][0] == 1 and p[schema.POSITION_IDS][0] == 0)
    packed[schema.INPUT_IDS][1] = packed[schema.LABEL_IDS][0] = 299 - packed[schema.INPUT_IDS][1]


def restart_a_part(packs):
    """The last part of a sequence passes for a sequence."""
    packed = next(p for p in packs[::-1] if p[schema.POSITION_IDS][0] > 0)
    end = packed[schema.INPUT_MASK].count(1)
    packed[schema.POSITION_IDS][:end] = range(end)


def swap_rows_of_a_step(packs):
    packs[NUM_ROWS : NUM_ROWS + 2] = reversed(packs[NUM_ROWS : NUM_ROWS + 2])


# A fault has the number of sequences that are missing; None where the packs are malformed, of whose rules
# `tests/records/` has the others
FAULTS = {
    "bert": [
        (flip(schema.INPUT_IDS), 1),
        (flip(schema.SEGMENT_IDS), 1),
        (flip(schema.MASKED_LM_IDS), 1),
        (flip(schema.MASKED_LM_POSITIONS), 1),
        (flip(schema.NEXT_SENTENCE_LABELS, 1), 1),
        (drop_last_prediction, 1),
        (swap_tokens, 2),
        (forget_a_slot, None),
    ],
    "causal": [
        (label_across_a_boundary, 1),
        (drop_a_label, 1),
        (drop_a_label_of_id_0, 1),
        (drop_the_last_sequence, 1),
        (count_bytes_twice, 1),
        (change_a_token, 1),
        (repeat_a_pack, 1),
    ],
}
FAULTS["rows"] = [*FAULTS["causal"], (restart_a_part, 1), (swap_rows_of_a_step, None)]


@pytest.mark.parametrize(
    ("kind", "fault", "num_missing"), [(kind, *fault) for kind, faults in FAULTS.items() for fault in faults]
)
def test_faults_are_seen(made, damage, kind, fault, num_missing):
    result = damage(kind, fault)
    assert not result.is_equal and result.malformed == (num_missing is None)
    assert (
        result.num_missing == (num_missing or 0) <= result.num_unexpected + (fault is drop_the_last_sequence)
    )


@pytest.mark.parametrize("kind", INPUTS)
def test_a_missing_sequence_is_named_by_its_length(made, tmp_path, kind):
    one_less = tmp_path / "less.tfrecord"
    records = list(read_records(f"{made}/{INPUTS[kind]}.tfrecord"))
    tfrecords.write_records(one_less, records[:-1])
    result = compare_files([str(one_less)], files_of(made / kind), "error")
    assert any(f"({LENGTHS[-1]} tokens)" in sentence for sentence in result.differences)


@pytest.fixture
def find_false(made, tmp_path):
    """Function that changes the manifest beside packs: sentences that name what is false."""

    def change_and_compare(kind, change):
        folder = Path(shutil.copytree(made / kind, tmp_path / kind))
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        result = compare(made, kind, folder)
        assert result.is_equal
        return result.false_claims

    return change_and_compare


def add(name, number):
    return lambda manifest: manifest.update({name: manifest[name] + number})


NUMBERS = ("num_packs", "num_sequences", "num_parts", "num_tokens", "num_records", "depth")
STEPS = dict.fromkeys(NUMBERS, 1) | {"efficiency": 1e-6, "packing_factor": 1e-6}
WRONG_ROWS = [
    (f"`{name}` must be ", add(name, sign * step)) for name, step in STEPS.items() for sign in (1, -1)
]
# `test_manifest_claims.py` has what is not of causal packs alone
WRONG = [
    ("`vocab_size` must be above", lambda manifest: manifest.update(vocab_size=LARGEST)),
    ("`objective`", lambda manifest: manifest.update(objective="mlm_nsp")),
]


def test_largest_label_is_within_the_vocabulary(find_false):
    assert find_false("causal", lambda manifest: manifest.update(vocab_size=LARGEST + 1)) == ()


@pytest.mark.parametrize(
    ("kind", "word", "lie"),
    [("causal", *claim) for claim in WRONG] + [("rows", *claim) for claim in WRONG + WRONG_ROWS],
)
def test_false_claims_are_found(find_false, kind, word, lie):
    (sentence,) = find_false(kind, lie)
    assert word in sentence


def test_rows_of_another_number(made, tmp_path):
    folder = Path(shutil.copytree(made / "rows", tmp_path / "rows"))
    manifest = json.loads((folder / "manifest.json").read_text())
    for num_rows in (NUM_ROWS + 1, 1):
        (folder / "manifest.json").write_text(json.dumps({**manifest, "num_rows": num_rows}))
        assert not compare(made, "rows", folder).is_equal
    for num_rows in (0, "3", None):
        (folder / "manifest.json").write_text(json.dumps({**manifest, "num_rows": num_rows}))
        with pytest.raises(InputError, match="`num_rows` of the manifest"):
            compare(made, "rows", folder)


def test_packs_of_one_objective_against_inputs_of_the_other(made):
    with pytest.raises(InputError, match="all files must be for one objective"):
        compare(made, "bert", made / "causal")


# Multisets compared by sums


def draw(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, (count, 2), np.uint64)


def sums_of(*parts):
    sums = BucketSums()
    for part in parts:
        sums.add(part)
    return sums


ONE_BIT = np.zeros((5000, 2), np.uint64)
ONE_BIT[0, 1] = 1
DIFFERENCES = {
    "one dropped": lambda digests: digests[1:],
    "one twice": lambda digests: np.concatenate([digests, digests[:1]]),
    "one replaced by another": lambda digests: np.concatenate([digests[1:], digests[1:2]]),
    "one bit": lambda digests: digests ^ ONE_BIT,
}


@pytest.mark.parametrize("damage", DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_every_difference_shows_in_its_bucket(damage):
    digests = draw(5000)
    changed = damage(digests)
    different = sums_of(digests).find_different(sums_of(changed))
    assert set(find_buckets(digests[:1])) <= set(different.tolist()) | set(find_buckets(digests[1:2]))
    assert 1 <= len(different) <= 2
    origins = np.zeros((5000, 3), np.int64)
    held, _ = hold([(digests[:9], origins[:9]), (digests[9:], origins[9:])], different)
    assert np.array_equal(held, digests[np.isin(find_buckets(digests), different)])


def test_equal_digests_cancel_nothing():
    """Exclusive or, the tempting other choice, takes two equal sequences for none, or for two others."""
    digests = draw(3)
    digests[:, 0] = digests[0, 0]  # one bucket, and equal numbers: the sums alone can tell
    one, two, three = digests[:1], digests[1:2], digests[2:]
    assert len(sums_of(one, one, three).find_different(sums_of(two, two, three))) == 1
    assert len(sums_of(digests[[0, 0, 2]]).find_different(sums_of(digests[[1, 1, 2]]))) == 1
    assert len(sums_of(one, one, one).find_different(sums_of(one))) == 1


def test_unmatched_is_the_difference_of_multisets():
    a, b, c = [1, 1], [1, 2], [0, 9]
    left, right = np.array([a, b, a], np.uint64), np.array([a, c], np.uint64)
    assert [rows.tolist() for rows in unmatched(left, right)] == [[1, 2], [1]]
    assert [rows.tolist() for rows in unmatched(left, right[:0])] == [[0, 1, 2], []]
    rng = np.random.default_rng(0)
    left, right = (rng.integers(0, 9, (300, 2)).astype(np.uint64) for _ in range(2))
    expected, partners = [], list(map(tuple, right.tolist()))
    for row, digest in enumerate(map(tuple, left.tolist())):
        if digest in partners:
            partners.remove(digest)
        else:
            expected.append(row)
    assert unmatched(left, right)[0].tolist() == expected
    assert sorted(map(tuple, right[unmatched(left, right)[1]].tolist())) == sorted(partners)


def test_entirely_different_files_are_counted(tmp_path, monkeypatch):
    lengths = np.random.default_rng(5).integers(3, 16, 300)
    one, other = (
        write_features(tmp_path / f"{seed}.tfrecord", make_features(lengths, 16, seed)) for seed in range(2)
    )
    out = tmp_path / "out"
    pack(PackConfig(input_file=other, output_dir=str(out), max_seq_length=16, num_workers=1))
    packs = sorted(str(path) for path in out.glob("*.tfrecord"))
    expected = compare_files([one], packs, "error")
    assert (expected.num_missing, expected.num_unexpected) == (300, 300)
    numbers = next(read_packed(packs[0]))["record_numbers"][:5]
    assert [sentence.split(" (")[0] for sentence in expected.differences] == [
        *(f"in the inputs, not in the packs: {one}, record {number}" for number in range(1, 6)),
        *(f"in the packs, not in the inputs: {packs[0]}, record {number}" for number in numbers),
    ]
    monkeypatch.setattr(verification, "MOST_HELD", 100)
    assert compare_files([one], packs, "error") == expected
