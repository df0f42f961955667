"""Plans of features with two capacities by hand, and which record it is that does not fit."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from bert_packed.assembly.feature_packs import FeatureKind
from bert_packed.assembly.feature_spec import MAX_CAPACITIES, MAX_CLASSES, parse_features
from bert_packed.core.settings import InputError
from bert_packed.records import tfrecords
from data_gen.pack_config import PackConfig
from data_gen.pack_steps import pack_bytes

KIND = FeatureKind(parse_features("a:int:10,b:int:6"), "error")


def count(lengths):
    """The histogram of (length of a, length of b)."""
    a, b = np.array(lengths).T
    return np.bincount(KIND.lengths({"a:length": a, "b:length": b}), minlength=KIND.num_lengths)


def test_figures_of_a_plan_by_hand():
    """22 of 10 positions take three packs, in one of which the 4 stands beside a 6."""
    planned = KIND.make_plan(count([(6, 1), (6, 1), (6, 1), (4, 3)]), "", "max")
    figures = ("num_sequences", "num_packs", "depth", "lower_bound", "gap")
    assert [planned[name] for name in figures] == [4, 3, 2, 3, 0]
    assert planned["efficiency"] == pytest.approx((22 / 30 + 6 / 18) / 2)
    assert planned["packing_factor"] == 4 / 3


def test_depth_and_gap():
    alone = KIND.make_plan(count([(4, 3)] * 3), "", 1)
    assert (alone["num_packs"], alone["depth"], alone["lower_bound"]) == (3, 1, 3)
    # 30 of 10 positions, but no two together
    wide = KIND.make_plan(count([(6, 1)] * 5), "", "max")
    assert (wide["num_packs"], wide["lower_bound"], wide["gap"]) == (5, 3, pytest.approx(2 / 3))


def test_lengths_rounded_up_stay_within_the_capacity():
    data = FeatureKind(parse_features("a:int:1001,b:int:301"), "error")
    full = data.lengths({"a:length": np.array([1001]), "b:length": np.array([301])})
    described = data.describe_lengths(np.bincount(full, minlength=data.num_lengths))
    assert (described["lengths"], described["grains"]) == ([[1001, 301]], [8, 3])


def write(path, *records):
    """Records of whole numbers, also of none."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            example = tf.train.Example()
            for name, values in record.items():
                example.features.feature[name].int64_list.value.extend(values)
                example.features.feature[name].int64_list.SetInParent()
            writer.write(example.SerializeToString())
    return str(path)


FITS = {"a": [1, 2, 3], "b": [4]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"a": [1] * 11, "b": [1]}, "a must have at most 10 positions, .*Received: 11"),
        ({"a": [1], "b": [1] * 7}, "b must have at most 6 positions, .*Received: 7"),
        ({"a": [], "b": [1]}, "a must have 1 values at each position, and one position or more"),
        ({"a": [1], "b": [3, -1]}, "b must not be negative"),
        ({"a": [-1], "b": [3]}, "a must not be negative"),
    ],
)
def test_the_record_that_does_not_fit_is_named(tmp_path, record, message):
    path = write(tmp_path / "in.tfrecord", FITS, FITS, record, FITS)
    with pytest.raises(InputError, match=rf"in\.tfrecord, record 3: {message}"):
        list(KIND.read(path))


def test_what_fits_is_read(tmp_path):
    path = write(tmp_path / "in.tfrecord", FITS, {"a": [7] * 10, "b": []}, {"a": [7], "b": [8] * 6})
    ((columns, overlong, num_records),) = KIND.read(path)
    assert (num_records, overlong) == (3, {"dropped": 0})
    assert columns["a:length"].tolist() == [3, 10, 1] and columns["b:length"].tolist() == [1, 0, 6]
    assert columns["record_numbers"].tolist() == [1, 2, 3]


def test_what_does_not_fit_in_any_capacity_is_dropped_and_later_records_keep_their_numbers(
    tmp_path, monkeypatch
):
    long_a, long_b = {"a": [1] * 11, "b": [1]}, {"a": [1], "b": [1] * 7}
    path = write(tmp_path / "in.tfrecord", long_a, FITS, long_b, FITS, FITS, long_a)
    monkeypatch.setattr(tfrecords, "READ_BATCH", 2)
    batches = list(dataclasses.replace(KIND, overlong="drop").read(path))
    assert [(num_records, overlong) for _, overlong, num_records in batches] == [
        (2, {"dropped": 1}),
        (2, {"dropped": 1}),
        (2, {"dropped": 1}),
    ]
    numbers = [number for columns, _, _ in batches for number in columns["record_numbers"].tolist()]
    assert numbers == [2, 4, 5]


def test_a_feature_as_long_as_another_has_all_its_values_at_each_position(tmp_path):
    """Seven values are more than two positions of three, and fewer than three."""
    data = FeatureKind(parse_features("a:int:10,places:int*3:=a"), "error")
    for num_values in (5, 7):
        record = {"a": [1, 2], "places": list(range(num_values))}
        path = write(tmp_path / "in.tfrecord", {"a": [1], "places": [1, 2, 3]}, record)
        with pytest.raises(
            InputError, match=rf"record 2: places must be as long as a\. .*{num_values} values"
        ):
            list(data.read(path))


@pytest.mark.parametrize("num_capacities", range(2, MAX_CAPACITIES + 1))
def test_no_number_of_capacities_has_too_many_classes(num_capacities):
    """Nor just one: whoever rounds the root of the limit up is over it."""
    spec = ",".join(f"f{index}:int:60" for index in range(num_capacities))
    assert 2**num_capacities <= FeatureKind(parse_features(spec), "error").num_lengths <= MAX_CLASSES


def test_a_pack_takes_all_values_of_each_position():
    kind = FeatureKind(parse_features("a:int:10,places:float*3:=a"), "error")
    # also what tells a sequence: its file, its record, and how long it is
    assert pack_bytes(kind, 2) == 10 * 8 + 10 * 3 * 4 + 2 * (4 + 8 + 8)


def test_no_pack_is_deeper_than_the_first_capacity_has_positions():
    """A sequence has one of it at least, and may have none of the others."""
    given = {"input_file": "x", "output_dir": "y", "features": "few:int:4,many:int:100"}
    assert PackConfig(**given, max_sequences_per_pack=4).max_sequences_per_pack == 4
    with pytest.raises(InputError, match=r"`max_sequences_per_pack` must be .*the capacity of few"):
        PackConfig(**given, max_sequences_per_pack=5)
