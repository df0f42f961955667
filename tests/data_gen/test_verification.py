"""Packs that are not what their inputs were are found, by sums of digests in little memory."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from causal_files import make_sequences, read_examples, write_sequences
from unpacked_records import make_features, write_features

from bert_packed import schema
from bert_packed.core.settings import InputError
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
TOKENS = (schema.INPUT_IDS, schema.INPUT_MASK, schema.POSITION_IDS, schema.LABEL_IDS, schema.LABEL_MASK)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Inputs, and packs of them: whole sequences, and rows."""
    folder = tmp_path_factory.mktemp("made")
    path = write_sequences(folder / "in.tfrecord", SEQUENCES)
    given = {"input_file": path, "max_seq_length": S, "num_workers": 1, "num_shards": 2}
    pack(PackConfig(output_dir=str(folder / "whole"), **given))
    pack(PackConfig(output_dir=str(folder / "rows"), split_sequences=True, num_rows=NUM_ROWS, **given))
    return folder


def files_of(folder):
    return [str(path) for path in sorted(Path(folder).glob("packed-*.tfrecord"))]


@pytest.fixture
def damage(made, tmp_path):
    """Function that changes the packs of one kind, and compares them with the inputs."""

    def change_and_compare(kind, change):
        folder = Path(shutil.copytree(made / kind, tmp_path / kind))
        paths = files_of(folder)
        held = [read_examples([path]) for path in paths]
        packs = [packed for some in held for packed in some]
        changed = change(copy.deepcopy(packs)) if change else packs
        start = 0
        for path, some in zip(paths, held, strict=True):
            last = path == paths[-1]
            write_sequences(path, changed[start : None if last else start + len(some)])
            start += len(some)
        return compare_files([f"{made}/in.tfrecord"], paths, "error")

    return change_and_compare


def has(packed, slot):
    return slot in packed[schema.INPUT_MASK]


def span(packed, slot):
    """First place of a sequence in a pack, and the place after its last."""
    mask = packed[schema.INPUT_MASK]
    return mask.index(slot), len(mask) - mask[::-1].index(slot)


def drop_token_columns(packed, first, last):
    """Take places out of a pack; padding moves up."""
    for name in TOKENS:
        del packed[name][first:last]
        packed[name].extend([0] * (last - first))


def label_across_a_boundary(packs):
    """The mistake of a packer that shifts the pack rather than each sequence."""
    packed = next(p for p in packs if has(p, 2) and p[schema.LABEL_MASK][span(p, 1)[1] - 1] == 0)
    end = span(packed, 1)[1]
    packed[schema.LABEL_IDS][end - 1] = packed[schema.INPUT_IDS][end]
    packed[schema.LABEL_MASK][end - 1] = 1
    return packs


def drop_a_label(packs):
    packed = packs[1]
    place = packed[schema.LABEL_MASK].index(1)
    packed[schema.LABEL_IDS][place] = packed[schema.LABEL_MASK][place] = 0
    return packs


def drop_a_label_of_id_0(packs):
    """0 is a token like others; only the mask says that there was a label."""
    packed, place = next(
        (packed, place)
        for packed in packs
        for place, (label, owner) in enumerate(
            zip(packed[schema.LABEL_IDS], packed[schema.LABEL_MASK], strict=True)
        )
        if label == 0 and owner
    )
    packed[schema.LABEL_MASK][place] = 0
    return packs


def drop_last_sequence_of(packed):
    slot = max(packed[schema.INPUT_MASK])
    drop_token_columns(packed, *span(packed, slot))
    packed[schema.SEQUENCE_WEIGHTS][slot - 1] = packed[schema.SEQUENCE_BYTES][slot - 1] = 0


def drop_the_last_sequence(packs):
    drop_last_sequence_of(packs[-1] if has(packs[-1], 1) else packs[-2])
    return packs


def pad_within_a_row(packs):
    drop_last_sequence_of(packs[0])
    return packs


def count_bytes_twice(packs):
    packed = next(p for p in packs if p[schema.SEQUENCE_BYTES][0])
    packed[schema.SEQUENCE_BYTES][0] *= 2
    return packs


def change_a_token(packs):
    """Change a token and the label before it, so that the pack is well formed."""
    packed = next(p for p in packs if p[schema.LABEL_MASK][0] == 1 and p[schema.POSITION_IDS][0] == 0)
    packed[schema.INPUT_IDS][1] = packed[schema.LABEL_IDS][0] = 299 - packed[schema.INPUT_IDS][1]
    return packs


def pad_between_sequences(packs):
    """Pad in the middle of a row, with all else as it was."""
    packed = next(p for p in packs if has(p, 2) and p[schema.INPUT_MASK][-1] == 0)
    place = span(packed, 2)[0]
    for name in TOKENS:
        packed[name].insert(place, 0)
        del packed[name][-1]
    return packs


def repeat_a_pack(packs):
    return [*packs[:-1], packs[0]]


FAULTS = [
    label_across_a_boundary,
    drop_a_label,
    drop_a_label_of_id_0,
    drop_the_last_sequence,
    count_bytes_twice,
    change_a_token,
    pad_between_sequences,
    repeat_a_pack,
]


def continuing(packs):
    """Number of a pack that goes on from its row's pack before, with one after it in the row."""
    return next(
        number
        for number, packed in enumerate(packs[:-NUM_ROWS])
        if packed[schema.POSITION_IDS][0] > 0 and packs[number + NUM_ROWS][schema.POSITION_IDS][0] > 0
    )


def lose_a_part_at_a_cut(packs):
    packed = packs[continuing(packs)]
    end = span(packed, 1)[1]
    drop_token_columns(packed, 0, end)
    packed[schema.INPUT_MASK] = [max(0, owner - 1) for owner in packed[schema.INPUT_MASK]]
    packed[schema.LABEL_MASK] = [max(0, owner - 1) for owner in packed[schema.LABEL_MASK]]
    for name in (schema.SEQUENCE_WEIGHTS, schema.SEQUENCE_BYTES):
        packed[name] = [*packed[name][1:], 0]
    return packs


def restart_a_part(packs):
    packed = packs[continuing(packs)]
    end = span(packed, 1)[1]
    packed[schema.POSITION_IDS][:end] = range(end)
    return packs


def swap_rows_of_a_step(packs):
    step = next(
        number
        for number in range(0, len(packs), NUM_ROWS)
        if packs[number][schema.POSITION_IDS][0] != packs[number + 1][schema.POSITION_IDS][0]
    )
    packs[step], packs[step + 1] = packs[step + 1], packs[step]
    return packs


def lose_a_step(packs):
    first = continuing(packs) // NUM_ROWS * NUM_ROWS
    return packs[:first] + packs[first + NUM_ROWS :]


ROW_FAULTS = [lose_a_part_at_a_cut, restart_a_part, swap_rows_of_a_step, lose_a_step, pad_within_a_row]


@pytest.mark.parametrize("kind", ["whole", "rows"])
def test_good_packs_are_equal(made, damage, kind):
    result = compare_files([f"{made}/in.tfrecord"], files_of(made / kind), "error")
    assert result.is_good and result.num_input_sequences == result.num_packed_sequences == len(LENGTHS)
    # what is written here again is the same, byte for byte: below, nothing but the fault is found
    assert damage(kind, None).is_good


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("whole", fault) for fault in FAULTS] + [("rows", fault) for fault in FAULTS + ROW_FAULTS],
)
def test_faults_are_seen(damage, kind, fault):
    result = damage(kind, fault)
    assert not result.is_equal
    assert fault in ROW_FAULTS or result.malformed or result.num_missing + result.num_unexpected > 0


@pytest.mark.parametrize("kind", ["whole", "rows"])
def test_a_missing_sequence_is_named_by_its_length(made, tmp_path, kind):
    one_less = write_sequences(tmp_path / "less.tfrecord", SEQUENCES[:-1])
    result = compare_files([one_less], files_of(made / kind), "error")
    assert any(f"({LENGTHS[-1]} tokens)" in sentence for sentence in result.differences)


@pytest.fixture
def find_false(made, tmp_path):
    """Function that changes the manifest beside packs: sentences that name what is false."""

    def change_and_compare(kind, change):
        folder = tmp_path / kind
        shutil.copytree(made / kind, folder, dirs_exist_ok=True)
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        result = compare_files([f"{made}/in.tfrecord"], files_of(folder), "error")
        assert result.is_equal
        return result.false_claims

    return change_and_compare


def add(name, number):
    return lambda manifest: manifest.update({name: manifest[name] + number})


NUMBERS = ("num_packs", "num_sequences", "num_parts", "num_tokens", "num_records", "depth")
STEPS = dict.fromkeys(NUMBERS, 1) | {"efficiency": 1e-6, "packing_factor": 1e-6}
WRONG = [
    ("`vocab_size` must be above", lambda manifest: manifest.update(vocab_size=LARGEST)),
    ("`objective`", lambda manifest: manifest.update(objective="mlm_nsp")),
    ("`spec`", lambda manifest: manifest["spec"].update(max_sequences_per_pack=99)),
    ("`histogram`", lambda manifest: manifest["histogram"]["counts"].append(1)),
    ("`sha256 of packed-", lambda manifest: manifest["files"][0].update(sha256="0" * 64)),
    ("`num_records of ", lambda manifest: manifest["inputs"][0].update(num_records=1)),
]
WRONG_ROWS = [
    (f"`{name}` must be ", add(name, sign * step)) for name, step in STEPS.items() for sign in (1, -1)
]


def test_largest_label_is_within_the_vocabulary(find_false):
    assert find_false("whole", lambda manifest: manifest.update(vocab_size=LARGEST + 1)) == ()


@pytest.mark.parametrize(
    ("kind", "word", "lie"),
    [("whole", *claim) for claim in WRONG] + [("rows", *claim) for claim in WRONG + WRONG_ROWS],
)
def test_false_claims_are_found(find_false, kind, word, lie):
    (sentence,) = find_false(kind, lie)
    assert word in sentence


def test_rows_of_another_number(made, tmp_path):
    folder = Path(shutil.copytree(made / "rows", tmp_path / "rows"))
    manifest = json.loads((folder / "manifest.json").read_text())
    for num_rows in (NUM_ROWS + 1, 1):
        (folder / "manifest.json").write_text(json.dumps({**manifest, "num_rows": num_rows}))
        assert not compare_files([f"{made}/in.tfrecord"], files_of(folder), "error").is_equal
    for num_rows in (0, "3", None):
        (folder / "manifest.json").write_text(json.dumps({**manifest, "num_rows": num_rows}))
        with pytest.raises(InputError, match="`num_rows` of the manifest"):
            compare_files([f"{made}/in.tfrecord"], files_of(folder), "error")


def test_packs_of_one_objective_against_inputs_of_the_other(made, tmp_path):
    other = write_features(tmp_path / "bert.tfrecord", make_features([5, 8], 8))
    with pytest.raises(InputError, match="all files must be for one objective"):
        compare_files([other], files_of(made / "whole"), "error")


# Multisets compared by sums


def draw(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, (count, 2), np.uint64)


def sums_of(*parts):
    sums = BucketSums()
    for part in parts:
        sums.add(part)
    return sums


def drop(digests):
    return digests[1:]


def double(digests):
    return np.concatenate([digests, digests[:1]])


def replace_by_another(digests):
    return np.concatenate([digests[1:], digests[1:2]])


def change_one_bit(digests):
    changed = digests.copy()
    changed[0, 1] ^= np.uint64(1)
    return changed


@pytest.mark.parametrize("damage", [drop, double, replace_by_another, change_one_bit])
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
