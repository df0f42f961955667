"""Records of any features are packed without a loss, each feature within its capacity."""

import pickle
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from bert_packed.assembly.feature_packs import FeatureKind
from bert_packed.assembly.feature_spec import parse_features
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from bert_packed.packing.vector_packing import lower_bound, pack_vectors
from data_gen import pack_steps, verify_tfrecords
from data_gen.jobs.steps import Job
from data_gen.pack_config import PackConfig
from data_gen.pack_job import metrics_row, pack
from data_gen.pack_tfrecords import DESCRIPTION, main

PAIRS = "inputs:int:40,targets:int:12"
MOLECULES = "atoms:int:30,places:float*3:=atoms,energy:float:each"


def example(**features):
    return tf.train.Example(
        features=tf.train.Features(
            feature={
                name: tf.train.Feature(int64_list=tf.train.Int64List(value=values))
                if np.asarray(values).dtype.kind == "i"
                else tf.train.Feature(float_list=tf.train.FloatList(value=values))
                for name, values in features.items()
            }
        )
    ).SerializeToString()


def write(path, sequences):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for sequence in sequences:
            writer.write(example(**sequence))
    return str(path)


def make_pairs(rng, count=150):
    return [
        {
            "inputs": rng.integers(1, 99, rng.integers(1, 41)),
            "targets": rng.integers(1, 99, rng.integers(1, 13)),
        }
        for _ in range(count)
    ]


def make_molecules(rng, count=150):
    sizes = rng.integers(1, 31, count)
    return [
        {
            "atoms": rng.integers(1, 9, size),
            "places": rng.random(3 * size).astype(np.float32),
            "energy": rng.random(1).astype(np.float32),
        }
        for size in sizes
    ]


def read_packs(folder, names, widths):
    """Yield the sequences of every pack: lists of tuples, by a plain loop."""
    for path in sorted(folder.glob("*.tfrecord")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            features = tf.train.Example.FromString(record).features.feature
            values = {name: list(f.int64_list.value or f.float_list.value) for name, f in features.items()}
            depth = max(values[f"{names[0]}_sequence_ids"])
            found = []
            for owner in range(1, depth + 1):
                parts = []
                for name, (leader, width) in zip(names, widths, strict=True):
                    if leader is None:
                        parts.append(tuple(values[name][(owner - 1) * width : owner * width]))
                        continue
                    owners = values[f"{leader}_sequence_ids"]
                    places = [i for i, other in enumerate(owners) if other == owner]
                    positions = [values[f"{leader}_position_ids"][i] for i in places]
                    assert positions == list(range(len(places)))
                    parts.append(tuple(v for i in places for v in values[name][i * width : (i + 1) * width]))
                found.append(tuple(parts))
            yield found, {name: len(values[name]) for name in values}


def as_tuples(sequences):
    return Counter(tuple(tuple(v.tolist()) for v in sequence.values()) for sequence in sequences)


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
    path = write(tmp_path / "in.tfrecord", sequences)
    out = tmp_path / "out"
    settings = {"features": spec, "max_sequences_per_pack": depth, "num_shards": 2}
    manifest = pack(PackConfig(input_file=path, output_dir=str(out), **settings))
    packs = list(read_packs(out, list(sequences[0]), widths))
    assert Counter(s for found, _ in packs for s in found) == as_tuples(sequences)
    assert len(packs) == manifest["num_packs"] >= manifest["lower_bound"]
    assert manifest["packing_factor"] > 1.3
    assert max(len(found) for found, _ in packs) == manifest["depth"]
    assert len({tuple(sorted(shapes.items())) for _, shapes in packs}) == 1
    row = metrics_row(manifest)
    assert row["packs"] == len(packs) and 60 < row["efficiency %"] <= 100


def test_packs_of_other_features_have_no_verifier_and_that_is_said(tmp_path, capsys):
    path = write(tmp_path / "in.tfrecord", make_pairs(np.random.default_rng(0), 5))
    out = tmp_path / "out"
    pack(PackConfig(input_file=path, output_dir=str(out), features=PAIRS, num_shards=1))
    argv = ["v.py", f"--input_file={path}", f"--packed_file={out}/*.tfrecord"]
    capsys.readouterr()  # the summary, shown where a command has run before
    assert run(verify_tfrecords.main, verify_tfrecords.VerifyConfig, verify_tfrecords.DESCRIPTION, argv) == 2
    assert capsys.readouterr().err == (
        "v.py: error: `packed_file` must be packs of BERT's records: those of --features have no verifier. "
        f"Received: {out}/packed-00000-of-00001.tfrecord.\n"
    )


def test_no_name_of_a_feature_is_taken_for_a_column_of_ours(tmp_path):
    """Labels that are not the lengths, in features called what a column of lengths might be called."""
    rng = np.random.default_rng(2)
    sequences = [
        {"audio": rng.integers(1, 99, size), "audio length": [size - 2], "audio_length": [size + 2]}
        for size in rng.integers(3, 17, 40)
    ]
    sequences = [{name: np.array(values) for name, values in sequence.items()} for sequence in sequences]
    path = write(tmp_path / "in.tfrecord", sequences)
    spec = "audio:int:16,audio length:int:each,audio_length:int:each"
    pack(PackConfig(input_file=path, output_dir=str(tmp_path / "out"), features=spec))
    packs = read_packs(tmp_path / "out", list(sequences[0]), [("audio", 1), (None, 1), (None, 1)])
    assert Counter(s for found, _ in packs for s in found) == as_tuples(sequences)
    # a SPEC cannot name the columns that packing adds
    data = FeatureKind(parse_features(spec), "error")
    for name in data.layout.keys() - {"audio", "audio length", "audio_length"}:
        with pytest.raises(ValueError, match=r"NAME:int|names that packing does not use"):
            parse_features(f"{name}:int:4")


def test_long_lengths_are_told_apart_in_steps(tmp_path):
    rng = np.random.default_rng(1)
    lengths = zip(rng.integers(1, 3001, 40), rng.integers(0, 401, 40), strict=True)
    sequences = [{"audio": np.ones(2 * n, np.float32), "text": np.arange(m)} for n, m in lengths]
    path = write(tmp_path / "in.tfrecord", sequences)
    spec = "audio:float*2:3000,text:int:400"
    config = PackConfig(input_file=path, output_dir=str(tmp_path / "out"), features=spec, num_shards=1)
    manifest = pack(config)
    packs = list(read_packs(tmp_path / "out", ["audio", "text"], [("audio", 2), ("text", 1)]))
    assert Counter(s for found, _ in packs for s in found) == as_tuples(sequences)
    # which the manifest tells: the packs of the plan, in lengths, are those that were written
    histogram = manifest["histogram"]
    assert (histogram["features"], histogram["grains"]) == (["audio", "text"], [24, 4])

    def round_up(length, grain, capacity):
        return min(-(-length // grain) * grain, capacity)

    def sizes_of(sequence):
        return round_up(len(sequence[0]) // 2, 24, 3000), round_up(len(sequence[1]), 4, 400)

    lengths_of = dict(zip(histogram["classes"], map(tuple, histogram["lengths"]), strict=True))
    counts = Counter(sizes_of(sequence) for found, _ in packs for sequence in found)
    assert counts == dict(zip(lengths_of.values(), histogram["counts"], strict=True))
    planned = Counter()
    for classes, count in manifest["plan"]["strategies"]:
        planned[tuple(sorted(lengths_of[number] for number in classes))] += count
    assert planned == Counter(tuple(sorted(map(sizes_of, found))) for found, _ in packs)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("a", "NAME:int|float[*N]:CAPACITY|=NAME|each, comma-separated, and not 'a'"),
        ("a:int:0", "and not 'a:int:0'"),
        ("a:int:4,a:int:5", "different names, and not 'a' twice"),
        ("a:int:4,slots:int:each", "names that packing does not use itself, and not 'slots'"),
        ("a:int:4,a_sequence_ids:int:=a", "does not use itself, and not 'a_sequence_ids'"),
        ("a:int:=b,b:int:4", "=b names a feature before it"),
        ("a:int:4,b:int:=a,c:int:=b", "=b names a feature before it that has a capacity"),
        ("a:int:each", "one feature has a capacity"),
    ],
)
def test_specs_that_are_none(spec, message):
    with pytest.raises(ValueError) as error:
        parse_features(spec)
    assert message in str(error.value)
    with pytest.raises(InputError, match="`features` must be "):
        PackConfig(input_file="x", output_dir="y", features=spec)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (
            {"atoms": [1, 2], "energy": [0.5]},
            r"record 1: features places are missing\. Received: atoms, energy",
        ),
        ({"atoms": [1, 2], "places": [0.0] * 5, "energy": [0.5]}, r"places must be as long as atoms"),
        ({"atoms": [1] * 31, "places": [0.0] * 93, "energy": [0.5]}, r"atoms must have at most 30 positions"),
        ({"atoms": [1], "places": [0.0] * 3, "energy": [0.5, 1]}, r"energy must have 1 values"),
        ({"atoms": [-1], "places": [0.0] * 3, "energy": [0.5]}, r"atoms must not be negative\. Received: -1"),
        (
            {"atoms": [1.5], "places": [0.0] * 3, "energy": [0.5]},
            r"atoms must hold int64\. Received: a float_list",
        ),
    ],
)
def test_records_that_do_not_fit(tmp_path, sequence, message):
    path = write(tmp_path / "in.tfrecord", [sequence])
    with pytest.raises(InputError, match=rf"in\.tfrecord, record 1: .*{message}|{message}"):
        pack(PackConfig(input_file=path, output_dir=str(tmp_path / "out"), features=MOLECULES))
    assert not (tmp_path / "out").exists()


ONE = "inputs:int:40"


@pytest.mark.parametrize(
    ("spec", "flag", "message"),
    [
        (ONE, "--max_seq_length=64", "`max_seq_length` must be left out with --features"),
        (ONE, "--max_seq_length=512", "`max_seq_length` must be left out with --features"),  # the default
        (ONE, "--max_predictions_per_pack=9", "`max_predictions_per_pack` must be left out with --features"),
        (PAIRS, "--algorithm=lpfhp", "`algorithm` must be left out with --features of several capacities"),
        (PAIRS, "--algorithm=cghp", "`algorithm` must be left out with --features of several capacities"),
        (ONE, "--overlong=truncate", "`overlong` must be error or drop with --features"),
        (ONE, "--masked_lm_weights=binary", "`masked_lm_weights` must be sequence with --features"),
    ],
)
def test_flags_that_features_cannot_follow(tmp_path, capsys, spec, flag, message):
    argv = ["p.py", "--input_file=x", f"--output_dir={tmp_path / 'out'}", f"--features={spec}", flag]
    assert run(main, PackConfig, DESCRIPTION, argv) == 2
    error = capsys.readouterr().err
    assert message in error and "Received: " in error and error.count("\n") == 1


def test_settings_that_features_cannot_follow_are_refused_and_not_recorded():
    with pytest.raises(InputError, match="`algorithm` must be left out"):
        PackConfig(input_file="x", output_dir="y", features=PAIRS, algorithm="lpfhp")
    assert "max_seq_length" not in PackConfig(input_file="x", output_dir="y", features=ONE).resolved()
    one = PackConfig(input_file="x", output_dir="y", features=ONE, algorithm="lpfhp").resolved()
    assert one["algorithm"] == "lpfhp"  # with one capacity every algorithm is at hand


def test_features_of_other_records_under_our_names_are_of_no_objective(tmp_path):
    sequences = [{"input_ids": np.array([7, 8]), "label_mask": np.array([1, 0])}] * 3
    path = write(tmp_path / "in.tfrecord", sequences)
    settings = {"features": "input_ids:int:4,label_mask:int:=input_ids", "num_workers": 1}
    manifest = pack(PackConfig(input_file=path, output_dir=str(tmp_path / "out"), **settings))
    assert manifest["num_packs"] == 2 and "objective" not in manifest
    # which the settings of records of that objective do not have
    assert manifest["settings"]["masked_lm_weights"] == "sequence"


def make_labelled(rng, count=100):
    vectors = rng.random((count, 5000)).astype(np.float32)
    return [{"ids": rng.integers(1, 99, 3), "vector": vector} for vector in vectors]


def test_features_of_one_a_sequence_count_as_data(tmp_path, monkeypatch):
    """Their bytes cut runs and parts: else long vectors beside short texts would be held as a whole."""
    kind = FeatureKind(parse_features("ids:int:64,vector:float*5000:each"), "error")
    assert pack_steps.pack_bytes(kind, 10) - pack_steps.pack_bytes(kind, 0) == 10 * (20_000 + 8 + 4 + 8)
    monkeypatch.setattr(pack_steps, "RUN_BYTES", 2**18)
    sequences = make_labelled(np.random.default_rng(0))
    path = write(tmp_path / "in.tfrecord", sequences)
    sizes = watch_steps(monkeypatch)
    settings = {"features": "ids:int:64,vector:float*5000:each", "num_shards": 1}
    pack(PackConfig(input_file=path, output_dir=str(tmp_path / "out"), num_workers=1, **settings))
    assert sum(name.startswith("measure-") for name in sizes) >= 5  # a pack is more than a part may be
    packs = read_packs(tmp_path / "out", ["ids", "vector"], [("ids", 1), (None, 5000)])
    assert Counter(s for found, _ in packs for s in found) == as_tuples(sequences)


def watch_steps(monkeypatch):
    """How many bytes each step's argument takes, which the parent holds for all steps at once."""
    sizes, run_steps = {}, Job.run

    def run_and_measure(job, steps, *rest):
        sizes.update((step.name, len(pickle.dumps(step.argument))) for step in steps)
        return run_steps(job, steps, *rest)

    monkeypatch.setattr(Job, "run", run_and_measure)
    return sizes


def test_nothing_grows_with_capacities_times_sequences(tmp_path, monkeypatch):
    """Of 15,876 classes a table of numbers would take 127 kB for every run and every part."""
    monkeypatch.setattr(pack_steps, "RUN_BYTES", 2**14)
    for number in range(4):
        write(tmp_path / f"in-{number}.tfrecord", make_pairs(np.random.default_rng(number), 40))
    sizes = watch_steps(monkeypatch)
    spec = "inputs:int:4000,targets:int:4000"
    assert FeatureKind(parse_features(spec), "error").num_lengths == 15_876
    path = f"{tmp_path}/in-*.tfrecord"
    pack(PackConfig(input_file=path, output_dir=str(tmp_path / "out"), features=spec, num_workers=1))
    sorting = [size for name, size in sizes.items() if name.startswith("sort-")]
    assert len(sorting) >= 4 and max(sorting) < 20_000


def test_vectors_are_packed_within_all_capacities():
    rng = np.random.default_rng(0)
    capacities = np.array([20, 7])
    sizes = np.unique(np.stack([rng.integers(1, 21, 60), rng.integers(0, 8, 60)], axis=1), axis=0)
    counts = rng.integers(1, 50, len(sizes))
    for depth in (1, 2, 5):
        strategies = pack_vectors(sizes, counts, capacities, depth)
        placed = np.zeros(len(sizes), np.int64)
        for strategy, times in strategies.items():
            assert len(strategy) <= depth and np.all(sizes[list(strategy)].sum(axis=0) <= capacities)
            np.add.at(placed, list(strategy), times)
        assert placed.tolist() == counts.tolist()
        assert sum(strategies.values()) >= lower_bound(sizes, counts, capacities, depth)
    assert sum(pack_vectors(sizes, counts, capacities, 1).values()) == counts.sum()


def fewest_by_trying(sequences, capacities, depth):
    """The fewest packs of a few sequences, each a tuple of lengths: every open pack is tried for each."""

    def fewest(index, packs):
        if index == len(sequences):
            return len(packs)
        options = [fewest(index + 1, (*packs, (sequences[index], 1)))]
        for place, (used, count) in enumerate(packs):
            total = tuple(a + b for a, b in zip(used, sequences[index], strict=True))
            if count < depth and all(a <= b for a, b in zip(total, capacities, strict=True)):
                options.append(fewest(index + 1, (*packs[:place], (total, count + 1), *packs[place + 1 :])))
        return min(options)

    return fewest(0, ())


def test_no_vector_bound_is_false():
    """Plain trial on small cases: no plan is below the fewest packs, and no bound above."""
    rng = np.random.default_rng(3)
    seen = Counter()
    for _ in range(150):
        capacities = rng.integers(2, 9, 2)
        sizes = np.unique(rng.integers([1, 0], capacities + 1, (3, 2)), axis=0)
        counts, depth = rng.integers(1, 3, len(sizes)), int(rng.integers(1, 4))
        sequences = [tuple(size) for size in np.repeat(sizes, counts, axis=0).tolist()]
        fewest = fewest_by_trying(sequences, capacities.tolist(), depth)
        packs = sum(pack_vectors(sizes, counts, capacities, depth).values())
        bound = lower_bound(sizes, counts, capacities, depth)
        assert bound <= fewest <= packs
        seen[bound == fewest] += 1
        totals = [sum(lengths) for lengths in zip(*sequences, strict=True)]
        parts = [-(-total // capacity) for total, capacity in zip(totals, capacities.tolist(), strict=True)]
        assert bound == max(*parts, -(-len(sequences) // depth))
    assert min(seen[True], seen[False]) > 5  # cases where the bound is tight, and where it is not


def test_the_bound_in_the_manifest_holds_for_lengths_rounded_up():
    """Capacities over 127 are told apart in steps: bounds take the least of a step, packs the most."""
    data = FeatureKind(parse_features("a:int:1000,b:int:300"), "error")
    columns = {"a:length": np.array([497, 503, 497, 503]), "b:length": np.array([1, 2, 1, 2])}
    histogram = np.bincount(data.lengths(columns), minlength=data.num_lengths)
    planned = data.make_plan(histogram, "", "max")
    assert planned["lower_bound"] <= 2 <= planned["num_packs"]  # 497 + 503 twice
    full = np.bincount(data.lengths({"a:length": np.full(6, 1000), "b:length": np.full(6, 1)}))
    assert data.make_plan(full, "", "max")["lower_bound"] == 6


@pytest.mark.parametrize("num", [2, 7, 13, 14])
def test_many_capacities(num):
    spec = ",".join(f"f{index}:int:{4 + index}" for index in range(num))
    data = FeatureKind(parse_features(spec), "error")
    assert data.num_lengths <= 2**14
    rng = np.random.default_rng(0)
    columns = {f"f{index}:length": rng.integers(1, 5 + index, 30) for index in range(num)}
    classes = data.lengths(columns)
    assert classes.min() > 0 and classes.max() < data.num_lengths
    described = data.describe_lengths(np.bincount(classes, minlength=data.num_lengths))
    rounded = dict(zip(described["classes"], described["lengths"], strict=True))
    for row, number in enumerate(classes.tolist()):
        assert all(rounded[number][index] >= columns[f"f{index}:length"][row] for index in range(num))
    planned = data.make_plan(np.bincount(classes, minlength=data.num_lengths), "", "max")
    assert planned["num_sequences"] == 30 and planned["lower_bound"] <= planned["num_packs"] <= 30


@pytest.mark.parametrize("num", [15, 16, 20])
def test_too_many_capacities_are_one_line(num, capsys):
    spec = ",".join(f"f{index}:int:9" for index in range(num))
    assert run(main, PackConfig, DESCRIPTION, ["p.py", "--input_file=a", f"--features={spec}"]) == 2
    error = capsys.readouterr().err
    assert f"such that at most 14 have a capacity of their own, not {num}" in error
    assert error.count("\n") == 1
