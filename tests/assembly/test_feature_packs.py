"""Records of any features are packed without a loss, each feature within its capacity."""

import pickle
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from bert_packed.assembly.feature_packs import FeatureKind
from bert_packed.assembly.feature_spec import MAX_CAPACITIES, MAX_CLASSES, parse_features
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from bert_packed.records import tfrecords
from data_gen import pack_steps, verify_tfrecords
from data_gen.jobs.steps import Job
from data_gen.pack_config import PackConfig
from data_gen.pack_job import metrics_row, pack
from data_gen.pack_tfrecords import main

ONE = "inputs:int:40"
PAIRS = "inputs:int:40,targets:int:12"
MOLECULES = "atoms:int:30,places:float*3:=atoms,energy:float:each"
SHORT = "a:int:10,b:int:6"
TRIPLES = "a:int:10,places:int*3:=a"


def kind_of(spec, overlong="error"):
    return FeatureKind(parse_features(spec), overlong)


def write(path, sequences):
    """Dicts from name to values, float where any is; of none, an empty list of whole numbers."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for sequence in sequences:
            example = tf.train.Example()
            for name, values in sequence.items():
                feature = example.features.feature[name]
                is_float = len(values) and np.asarray(values).dtype.kind == "f"
                held = feature.float_list if is_float else feature.int64_list
                held.value.extend(np.asarray(values).tolist())
                held.SetInParent()
            writer.write(example.SerializeToString())
    return str(path)


def make_pairs(rng, count=150):
    return [
        {
            name: rng.integers(1, 99, rng.integers(1, most + 1))
            for name, most in (("inputs", 40), ("targets", 12))
        }
        for _ in range(count)
    ]


def make_molecules(rng, count=150):
    return [
        {
            "atoms": rng.integers(1, 9, size),
            "places": rng.random(3 * size).astype(np.float32),
            "energy": rng.random(1).astype(np.float32),
        }
        for size in rng.integers(1, 31, count)
    ]


def pack_into(folder, path, spec, **settings):
    given = {"features": spec, "num_workers": 1, "num_shards": 2, **settings}
    return pack(PackConfig(input_file=str(path), output_dir=str(folder), **given))


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
    path, out = write(tmp_path / "in.tfrecord", sequences), tmp_path / "out"
    manifest = pack_into(out, path, spec, max_sequences_per_pack=depth)
    packs = list(read_packs(out, list(sequences[0]), widths))
    check_lossless(packs, sequences)
    assert len(packs) == manifest["num_packs"] >= manifest["lower_bound"]
    assert manifest["packing_factor"] > 1.3
    assert max(len(found) for found, _ in packs) == manifest["depth"]
    assert len({tuple(sorted(shapes.items())) for _, shapes in packs}) == 1
    row = metrics_row(manifest)
    assert row["packs"] == len(packs) and 60 < row["efficiency %"] <= 100


def test_packs_of_other_features_have_no_verifier(tmp_path, capsys):
    path, out = write(tmp_path / "in.tfrecord", make_pairs(np.random.default_rng(0), 5)), tmp_path / "out"
    pack_into(out, path, PAIRS, num_shards=1)
    argv = ["v.py", f"--input_file={path}", f"--packed_file={out}/*.tfrecord"]
    capsys.readouterr()  # the summary, shown where a command has run before
    assert run(verify_tfrecords.main, verify_tfrecords.VerifyConfig, argv) == 2
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
    path = write(tmp_path / "in.tfrecord", sequences)
    spec = "audio:int:16,audio length:int:each,audio_length:int:each"
    pack_into(tmp_path / "out", path, spec)
    packs = read_packs(tmp_path / "out", list(sequences[0]), [("audio", 1), (None, 1), (None, 1)])
    check_lossless(packs, sequences)
    # a SPEC cannot name the columns that packing adds
    for name in kind_of(spec).layout.keys() - sequences[0].keys():
        with pytest.raises(ValueError, match=r"NAME:int|names that packing does not use"):
            parse_features(f"{name}:int:4")


def test_long_lengths_are_told_apart_in_steps(tmp_path):
    rng = np.random.default_rng(1)
    lengths = zip(rng.integers(1, 3001, 40), rng.integers(0, 401, 40), strict=True)
    sequences = [{"audio": np.ones(2 * n, np.float32), "text": np.arange(m)} for n, m in lengths]
    path = write(tmp_path / "in.tfrecord", sequences)
    manifest = pack_into(tmp_path / "out", path, "audio:float*2:3000,text:int:400")
    packs = list(read_packs(tmp_path / "out", ["audio", "text"], [("audio", 2), ("text", 1)]))
    check_lossless(packs, sequences)
    # as the manifest says: the packs of the plan, in lengths, are those that were written
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


def capacities(num, capacity=9):
    return ",".join(f"f{index}:int:{capacity}" for index in range(num))


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
        ("a:int:1048577", "features with a capacity of at most 1048576, and not 1048577 of 'a'"),
        (f"a:int:{10**20},b:int:=a", "at most 1048576, and not 100000000000000000000 of 'a'"),
        (capacities(15), "such that at most 14 have a capacity of their own, not 15"),
    ],
)
def test_specs_that_are_none(spec, message):
    with pytest.raises(InputError) as error:
        PackConfig(input_file="x", output_dir="y", features=spec)
    assert str(error.value).startswith("`features` must be ") and message in str(error.value)


@pytest.mark.parametrize(
    ("spec", "sequence", "message"),
    [
        (
            MOLECULES,
            {"atoms": [1, 2], "places": [0.0] * 5, "energy": [0.5]},
            "places must be as long as atoms",
        ),
        (MOLECULES, {"atoms": [1], "places": [0.0] * 3, "energy": [0.5, 1]}, "energy must have 1 values"),
        (
            MOLECULES,
            {"atoms": [1.5], "places": [0.0] * 3, "energy": [0.5]},
            "atoms must hold int64. Received: a f",
        ),
        (SHORT, {"a": [1] * 11, "b": [1]}, "a must have at most 10 positions, .*Received: 11"),
        (SHORT, {"a": [1], "b": [1] * 7}, "b must have at most 6 positions, .*Received: 7"),
        (SHORT, {"a": [], "b": [1]}, "a must have 1 values at each position, and one position or more"),
        (SHORT, {"a": [1], "b": [3, -1]}, "b must not be negative. Received: -1"),
        (SHORT, {"a": [-1], "b": [3]}, "a must not be negative"),
        # more than two positions of three, and fewer than three
        (TRIPLES, {"a": [1, 2], "places": [1] * 5}, "places must be as long as a. .*5 values"),
        (TRIPLES, {"a": [1, 2], "places": [1] * 7}, "places must be as long as a. .*7 values"),
    ],
)
def test_the_record_that_does_not_fit_is_named(tmp_path, spec, sequence, message):
    fits = {"a": [1, 2], "b": [4], "places": [1] * 6, "atoms": [7, 8], "energy": [0.5]}
    fits = {**fits, "places": [0.5] * 6} if spec == MOLECULES else fits
    path = write(tmp_path / "in.tfrecord", [fits, fits, sequence, fits])
    with pytest.raises(InputError, match=rf"in\.tfrecord, record 3: {message}"):
        list(kind_of(spec).read(path))


def test_features_that_are_missing_are_named(tmp_path):
    path = write(tmp_path / "in.tfrecord", [{"atoms": [1, 2], "energy": [0.5]}])
    with pytest.raises(InputError, match=r"record 1: features places are missing\. Received: atoms, energy"):
        list(kind_of(MOLECULES).read(path))


def test_what_fits_is_read_and_what_does_not_is_dropped(tmp_path, monkeypatch):
    """The longest sequences, and those over either capacity; records keep their numbers."""
    fits = [{"a": [1, 2, 3], "b": [4]}, {"a": [7] * 10, "b": []}, {"a": [7], "b": [8] * 6}]
    long_a, long_b = {"a": [1] * 11, "b": [1]}, {"a": [1], "b": [1] * 7}
    path = write(tmp_path / "in.tfrecord", [long_a, fits[0], long_b, fits[1], fits[2], long_a])
    monkeypatch.setattr(tfrecords, "READ_BATCH", 2)
    batches = list(kind_of(SHORT, "drop").read(path))
    assert [(num_records, overlong) for _, overlong, num_records in batches] == [(2, {"dropped": 1})] * 3
    found = {
        name: [value for sequences, *_ in batches for value in sequences[name].tolist()]
        for name in ("a:length", "b:length", "record_numbers")
    }
    assert found == {"a:length": [3, 10, 1], "b:length": [1, 0, 6], "record_numbers": [2, 4, 5]}


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
        # a sequence has one position of the first at least, and may have none of the others
        ("few:int:4,many:int:100", "--max_sequences_per_pack=5", "must be at most the capacity of few"),
    ],
)
def test_flags_that_features_cannot_follow(tmp_path, capsys, spec, flag, message):
    argv = ["p.py", "--input_file=x", f"--output_dir={tmp_path / 'out'}", f"--features={spec}", flag]
    assert run(main, PackConfig, argv) == 2
    error = capsys.readouterr().err
    assert message in error and "Received: " in error and error.count("\n") == 1


def test_settings_that_features_cannot_follow_are_not_recorded():
    given = {"input_file": "x", "output_dir": "y"}
    resolved = PackConfig(**given, features=ONE, algorithm="lpfhp", max_sequences_per_pack=40).resolved()
    assert resolved["algorithm"] == "lpfhp"  # with one capacity every algorithm is at hand
    assert not resolved.keys() & {"max_seq_length", "max_predictions_per_pack"}
    assert "algorithm" not in PackConfig(**given, features=PAIRS).resolved()


def test_features_of_other_records_under_our_names_are_of_no_objective(tmp_path):
    path = write(tmp_path / "in.tfrecord", [{"input_ids": [7, 8], "label_mask": [1, 0]}] * 3)
    manifest = pack_into(tmp_path / "out", path, "input_ids:int:4,label_mask:int:=input_ids")
    assert manifest["num_packs"] == 2 and "objective" not in manifest
    # settings of records of that objective do not have it
    assert manifest["settings"]["masked_lm_weights"] == "sequence"


@pytest.fixture
def sizes(monkeypatch):
    """Bytes of each step's argument, which the parent holds for all steps at once; filled by packing."""
    found, run_steps = {}, Job.run

    def run_and_measure(job, steps, *rest):
        found.update((step.name, len(pickle.dumps(step.argument))) for step in steps)
        return run_steps(job, steps, *rest)

    monkeypatch.setattr(Job, "run", run_and_measure)
    return found


def test_features_of_one_a_sequence_count_as_data(tmp_path, monkeypatch, sizes):
    """Their bytes cut runs and parts: else long vectors beside short texts would be held as a whole."""
    spec, rng = "ids:int:64,vector:float*5000:each", np.random.default_rng(0)
    kind = kind_of(spec)
    assert pack_steps.pack_bytes(kind, 10) - pack_steps.pack_bytes(kind, 0) == 10 * (20_000 + 8 + 4 + 8)
    # and all values of each position
    assert pack_steps.pack_bytes(kind_of(TRIPLES), 2) == 10 * 8 + 10 * 3 * 8 + 2 * (4 + 8 + 8)
    monkeypatch.setattr(pack_steps, "RUN_BYTES", 2**18)
    vectors = rng.random((100, 5000)).astype(np.float32)
    sequences = [{"ids": rng.integers(1, 99, 3), "vector": vector} for vector in vectors]
    pack_into(tmp_path / "out", write(tmp_path / "in.tfrecord", sequences), spec, num_shards=1)
    assert sum(name.startswith("measure-") for name in sizes) >= 5  # a pack is more than a part may be
    check_lossless(read_packs(tmp_path / "out", ["ids", "vector"], [("ids", 1), (None, 5000)]), sequences)


def test_nothing_grows_with_capacities_times_sequences(tmp_path, monkeypatch, sizes):
    """Of 15,876 classes a table of numbers would take 127 kB for every run and every part."""
    monkeypatch.setattr(pack_steps, "RUN_BYTES", 2**14)
    for number in range(4):
        write(tmp_path / f"in-{number}.tfrecord", make_pairs(np.random.default_rng(number), 40))
    spec = "inputs:int:4000,targets:int:4000"
    assert kind_of(spec).num_lengths == 15_876
    pack_into(tmp_path / "out", f"{tmp_path}/in-*.tfrecord", spec)
    sorting = [size for name, size in sizes.items() if name.startswith("sort-")]
    assert len(sorting) >= 4 and max(sorting) < 20_000


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
    # 30 of 10 positions, but no two together
    wide = plan(SHORT, "max", a=[6] * 5, b=[1] * 5)
    assert (wide["num_packs"], wide["lower_bound"], wide["gap"]) == (5, 3, pytest.approx(2 / 3))


def test_bounds_hold_for_lengths_rounded_up():
    """Capacities over 127 are told apart in steps: bounds take the least of a step, packs the most."""
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
