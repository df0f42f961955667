"""Records of any features are packed without a loss, each feature within its capacity."""

from collections import Counter

import numpy as np
import pytest
from causal_files import read_examples, write_sequences

from bert_packed.assembly.feature_packs import MAX_CAPACITIES, MAX_CLASSES, FeatureKind, parse_features
from bert_packed.core.settings import InputError
from bert_packed.records import tfrecords
from data_gen.pack_config import PackConfig
from data_gen.pack_job import metrics_row, pack

PAIRS = "inputs:int:40,targets:int:12"
MOLECULES = "atoms:int:30,places:float*3:=atoms,energy:float:each"
SHORT = "a:int:10,b:int:6"
TRIPLES = "a:int:10,places:int*3:=a"


def kind_of(spec, overlong="error"):
    return FeatureKind(parse_features(spec), overlong)


def make_pairs(rng):
    sizes = zip(rng.integers(1, 41, 150), rng.integers(1, 13, 150), strict=True)
    return [{"inputs": rng.integers(1, 99, n), "targets": rng.integers(1, 99, m)} for n, m in sizes]


def make_molecules(rng):
    return [
        {
            "atoms": rng.integers(1, 9, size),
            "places": rng.random(3 * size).astype(np.float32),
            "energy": rng.random(1).astype(np.float32),
        }
        for size in rng.integers(1, 31, 150)
    ]


def pack_into(folder, path, spec, **settings):
    given = {"features": spec, "num_workers": 1, "num_shards": 2, **settings}
    return pack(PackConfig(input_file=str(path), output_dir=str(folder), **given))


def read_packs(folder, names, widths):
    """Yield the sequences of every pack: lists of tuples, by a plain loop."""
    for values in read_examples(folder.glob("*.tfrecord")):
        found = []
        for owner in range(1, max(values[f"{names[0]}_sequence_ids"]) + 1):
            parts = []
            for name, (leader, width) in zip(names, widths, strict=True):
                places = [owner - 1]
                if leader:
                    places = [i for i, one in enumerate(values[f"{leader}_sequence_ids"]) if one == owner]
                    positions = [values[f"{leader}_position_ids"][i] for i in places]
                    assert positions == list(range(len(places)))
                parts.append(tuple(v for i in places for v in values[name][i * width : (i + 1) * width]))
            found.append(tuple(parts))
        yield found, {name: len(values[name]) for name in values}


def check_lossless(packs, sequences):
    expected = Counter(tuple(tuple(np.asarray(v).tolist()) for v in s.values()) for s in sequences)
    assert Counter(s for found, _ in packs for s in found) == expected


@pytest.mark.parametrize("depth", [2, "max"])
@pytest.mark.parametrize(
    ("spec", "make", "widths"),
    [
        (PAIRS, make_pairs, [("inputs", 1), ("targets", 1)]),
        (MOLECULES, make_molecules, [("atoms", 1), ("atoms", 3), (None, 1)]),
    ],
)
def test_nothing_is_lost(tmp_path, spec, make, widths, depth):
    sequences = make(np.random.default_rng(0))
    path, out = write_sequences(tmp_path / "in.tfrecord", sequences), tmp_path / "out"
    manifest = pack_into(out, path, spec, max_sequences_per_pack=depth)
    packs = list(read_packs(out, list(sequences[0]), widths))
    check_lossless(packs, sequences)
    assert len(packs) == manifest["num_packs"] >= manifest["lower_bound"]
    assert manifest["packing_factor"] > 1.3
    assert max(len(found) for found, _ in packs) == manifest["depth"]
    assert len({tuple(sorted(shapes.items())) for _, shapes in packs}) == 1
    row = metrics_row(manifest)
    assert row["packs"] == len(packs) and 60 < row["efficiency %"] <= 100


def test_no_name_of_a_feature_is_taken_for_a_column_of_ours(tmp_path):
    """Labels that are not the lengths, in features called what a column of lengths might be called."""
    rng = np.random.default_rng(2)
    sequences = [
        {"audio": rng.integers(1, 99, size), "audio length": [size - 2], "audio_length": [size + 2]}
        for size in rng.integers(3, 17, 40)
    ]
    path = write_sequences(tmp_path / "in.tfrecord", sequences)
    spec = "audio:int:16,audio length:int:each,audio_length:int:each"
    pack_into(tmp_path / "out", path, spec)
    packs = read_packs(tmp_path / "out", list(sequences[0]), [("audio", 1), (None, 1), (None, 1)])
    check_lossless(packs, sequences)
    # a SPEC cannot name the columns that packing adds
    for name in kind_of(spec).layout.keys() - sequences[0].keys():
        with pytest.raises(ValueError, match=r"NAME:int|names that packing does not use"):
            parse_features(f"{name}:int:4")


def test_long_lengths_are_distinguished_in_steps(tmp_path):
    rng = np.random.default_rng(1)
    lengths = zip(rng.integers(1, 3001, 40), rng.integers(0, 401, 40), strict=True)
    sequences = [{"audio": np.ones(2 * n, np.float32), "text": np.arange(m)} for n, m in lengths]
    path = write_sequences(tmp_path / "in.tfrecord", sequences)
    manifest = pack_into(tmp_path / "out", path, "audio:float*2:3000,text:int:400")
    packs = list(read_packs(tmp_path / "out", ["audio", "text"], [("audio", 2), ("text", 1)]))
    check_lossless(packs, sequences)
    # the manifest is right: the packs of the plan, in lengths, are those that were written
    histogram = manifest["histogram"]
    assert (histogram["features"], histogram["grains"]) == (["audio", "text"], [24, 4])

    def sizes_of(sequence):
        audio, text = len(sequence[0]) // 2, len(sequence[1])
        return min(-(-audio // 24) * 24, 3000), min(-(-text // 4) * 4, 400)

    lengths_of = dict(zip(histogram["classes"], map(tuple, histogram["lengths"]), strict=True))
    counts = Counter(sizes_of(sequence) for found, _ in packs for sequence in found)
    assert counts == dict(zip(lengths_of.values(), histogram["counts"], strict=True))
    planned = Counter()
    for classes, count in manifest["plan"]["strategies"]:
        planned[tuple(sorted(lengths_of[number] for number in classes))] += count
    assert planned == Counter(tuple(sorted(map(sizes_of, found))) for found, _ in packs)


ATOM = {"atoms": [1], "places": [0.0] * 3, "energy": [0.5]}


def capacities(num, capacity=9):
    return ",".join(f"f{index}:int:{capacity}" for index in range(num))


def test_what_fits_is_read_and_what_does_not_is_dropped(tmp_path, monkeypatch):
    """The longest sequences, and those over either capacity; records keep their numbers."""
    fits = [{"a": [1, 2, 3], "b": [4]}, {"a": [7] * 10, "b": []}, {"a": [7], "b": [8] * 6}]
    long_a, long_b = {"a": [1] * 11, "b": [1]}, {"a": [1], "b": [1] * 7}
    path = write_sequences(tmp_path / "in.tfrecord", [long_a, fits[0], long_b, fits[1], fits[2], long_a])
    monkeypatch.setattr(tfrecords, "READ_BATCH", 2)
    batches = list(kind_of(SHORT, "drop").read(path))
    assert [(num_records, overlong) for _, overlong, num_records in batches] == [(2, {"dropped": 1})] * 3
    found = {
        name: [value for sequences, *_ in batches for value in sequences[name].tolist()]
        for name in ("a:length", "b:length", "record_numbers")
    }
    assert found == {"a:length": [3, 10, 1], "b:length": [1, 0, 6], "record_numbers": [2, 4, 5]}


def test_other_records_under_our_names_have_no_objective(tmp_path):
    path = write_sequences(tmp_path / "in.tfrecord", [{"input_ids": [7, 8], "label_mask": [1, 0]}] * 3)
    manifest = pack_into(tmp_path / "out", path, "input_ids:int:4,label_mask:int:=input_ids")
    assert manifest["num_packs"] == 2 and "objective" not in manifest
    # settings of records of that objective do not have it
    assert manifest["settings"]["masked_lm_weights"] == "sequence"


# Plans of several lengths, by hand


def plan(spec, depth, **lengths):
    """Plan for sequences with these lengths of each feature."""
    kind = kind_of(spec)
    classes = kind.lengths({f"{name}:length": np.array(values) for name, values in lengths.items()})
    return kind.make_plan(np.bincount(classes, minlength=kind.num_lengths), "", depth)


def test_figures_of_a_plan():
    """22 of 10 positions take three packs, in one of which the 4 is beside a 6."""
    planned = plan(SHORT, "max", a=[6, 6, 6, 4], b=[1, 1, 1, 3])
    figures = ("num_sequences", "num_packs", "depth", "lower_bound", "gap", "packing_factor")
    assert [planned[name] for name in figures] == [4, 3, 2, 3, 0, 4 / 3]
    assert planned["efficiency"] == pytest.approx((22 / 30 + 6 / 18) / 2)
    alone = plan(SHORT, 1, a=[4] * 3, b=[3] * 3)
    assert (alone["num_packs"], alone["depth"], alone["lower_bound"]) == (3, 1, 3)
    # 30 positions fill 3 packs of 10, but no two sequences fit together
    wide = plan(SHORT, "max", a=[6] * 5, b=[1] * 5)
    assert (wide["num_packs"], wide["lower_bound"], wide["gap"]) == (5, 3, pytest.approx(2 / 3))


def test_bounds_hold_for_lengths_rounded_up():
    """Capacities over 127 are distinguished in steps: bounds take the least of a step, packs the most."""
    planned = plan("a:int:1000,b:int:300", "max", a=[497, 503, 497, 503], b=[1, 2, 1, 2])
    assert planned["lower_bound"] <= 2 <= planned["num_packs"]  # 497 + 503 twice
    assert plan("a:int:1000,b:int:300", "max", a=[1000] * 6, b=[1] * 6)["lower_bound"] == 6
    kind = kind_of("a:int:1001,b:int:301")
    full = kind.lengths({"a:length": np.array([1001]), "b:length": np.array([301])})
    described = kind.describe_lengths(np.bincount(full, minlength=kind.num_lengths))
    assert (described["lengths"], described["grains"]) == ([[1001, 301]], [8, 3])


@pytest.mark.parametrize("num", range(2, MAX_CAPACITIES + 1))
def test_any_number_of_capacities(num):
    """Neither too many classes nor just one: whoever rounds the root of the limit up is over it."""
    assert 2**num <= kind_of(capacities(num, 60)).num_lengths <= MAX_CLASSES
    spec = ",".join(f"f{index}:int:{4 + index}" for index in range(num))
    kind, rng = kind_of(spec), np.random.default_rng(0)
    columns = {f"f{index}:length": rng.integers(1, 5 + index, 30) for index in range(num)}
    classes = kind.lengths(columns)
    assert classes.min() > 0 and classes.max() < kind.num_lengths <= MAX_CLASSES
    described = kind.describe_lengths(np.bincount(classes, minlength=kind.num_lengths))
    rounded = dict(zip(described["classes"], described["lengths"], strict=True))
    for row, number in enumerate(classes.tolist()):
        assert all(rounded[number][index] >= columns[f"f{index}:length"][row] for index in range(num))
    planned = kind.make_plan(np.bincount(classes, minlength=kind.num_lengths), "", "max")
    assert planned["num_sequences"] == 30 and planned["lower_bound"] <= planned["num_packs"] <= 30


@pytest.mark.parametrize(
    ("spec", "sequence", "message"),
    [
        (MOLECULES, {**ATOM, "places": [0.0] * 5}, "places must be as long as atoms"),
        (MOLECULES, {**ATOM, "energy": [0.5, 1]}, "energy must have 1 values"),
        (MOLECULES, {**ATOM, "atoms": [1.5]}, "atoms must hold int64. Received: a f"),
        (SHORT, {"a": [1] * 11, "b": [1]}, "a must have at most 10 positions, .*Received: 11"),
        (SHORT, {"a": [1], "b": [1] * 7}, "b must have at most 6 positions, .*Received: 7"),
        (SHORT, {"a": [], "b": [1]}, "a must have 1 values at each position, and one position or more"),
        (SHORT, {"a": [1], "b": [3, -1]}, "b must not be negative. Received: -1"),
        (SHORT, {"a": [-1], "b": [3]}, "a must not be negative"),
        # "places" has more than two positions of three, and fewer
        (TRIPLES, {"a": [1, 2], "places": [1] * 5}, "places must be as long as a. .*5 values"),
        (TRIPLES, {"a": [1, 2], "places": [1] * 7}, "places must be as long as a. .*7 values"),
    ],
)
def test_the_record_that_does_not_fit_is_named(tmp_path, spec, sequence, message):
    fits = ATOM if spec == MOLECULES else {"a": [1, 2], "b": [4], "places": [1] * 6}
    path = write_sequences(tmp_path / "in.tfrecord", [fits, fits, sequence, fits])
    with pytest.raises(InputError, match=rf"in\.tfrecord, record 3: {message}"):
        list(kind_of(spec).read(path))


def test_features_that_are_missing_are_named(tmp_path):
    path = write_sequences(tmp_path / "in.tfrecord", [{"atoms": [1, 2], "energy": [0.5]}])
    with pytest.raises(InputError, match=r"record 1: features places are missing\. Received: atoms, energy"):
        list(kind_of(MOLECULES).read(path))
