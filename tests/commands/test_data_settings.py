"""Every flag of the commands that make, pack and verify records arrives where it works.

Each command runs once with every flag changed and once with what must be given, and for flags that exclude
each other a few times more; what it did is looked at in its files, or in what its steps were handed.
"""

import contextlib
import dataclasses
import importlib.util
import io
import json
import types
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from causal_files import write_causal
from text_files import NUM_DOCUMENTS, write_text
from unpacked_records import make_features, write_features

from bert_packed import schema
from bert_packed.core import command_line
from bert_packed.records import examples, tfrecords
from bert_packed.records.manifests import read_manifest
from data_gen import (
    create_pretraining_data,
    dry_run,
    pack_job,
    pack_tfrecords,
    verification,
    verify_tfrecords,
)
from data_gen.jobs import runners
from data_gen.jobs.steps import Job
from data_gen.pack_config import PackConfig
from data_gen.text import create_job
from data_gen.text.create_config import CreateConfig
from data_gen.verify_tfrecords import VerifyConfig


@dataclasses.dataclass(frozen=True)
class Case:
    """How a setting is seen to arrive.

    Attributes:
        seen: Function from what `run` gave to what is looked at.
        expected: What that is in the run that changed the setting.
        run, other: The run that changed it, and one that did not, where it must be something else.
    """

    seen: Callable
    expected: object
    run: str = "changed"
    other: str = "default"


DIFFERENT = object()  # from the other run; no value to expect


def check(config_class, cases, made, given, name):
    """That a setting arrives; `given` has the flags of all runs in one."""
    assert name in cases, f"--{name} needs an entry here: how is it seen to arrive?"
    (field,) = (field for field in dataclasses.fields(config_class) if field.name == name)
    assert given[name] != field.default
    case = cases[name]
    found = case.seen(made[case.run])
    if case.expected is not DIFFERENT:
        assert found == case.expected
    if case.other:
        assert case.seen(made[case.other]) != found


def run(module, config_class, steps, output_dir, **flags):
    """A command under flags; the shards that it writes and the processes that it would start are noted."""
    seen = types.SimpleNamespace(jobs=[], shards=[], folder=output_dir, given=flags)

    class WatchedJob(Job):
        def __init__(self, work_folder, num_workers, runner, seconds=None):
            seen.jobs.append((num_workers, runner))
            super().__init__(work_folder)

    write_shard = steps.write_shard

    def watched(shard):
        seen.shards.append(shard)
        return write_shard(shard)

    flags = {"output_dir": output_dir, **flags}
    argv = ["command", *(f"--{name}={value!s}" for name, value in flags.items())]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as error:
        patch.setattr(steps, "Job", WatchedJob)
        patch.setattr(steps, "write_shard", watched)
        patch.setattr(runners.importlib.util, "find_spec", lambda name: importlib.util)  # all is installed
        with contextlib.redirect_stdout(io.StringIO()):
            seen.status = command_line.run(module.main, config_class, "", argv)
    seen.error, seen.manifest = error.getvalue(), read_manifest(output_dir)
    return seen


def used(folder):
    """A folder that holds records of another run."""
    folder.mkdir()
    (folder / "train-00007-of-00008.tfrecord").write_text("old")
    return folder


# Making records

CREATED = {
    "vocab_size": 60,
    "do_lower_case": False,
    "do_whole_word_mask": True,
    "mask_replace_prob": 0.5,
    "random_replace_prob": 0.25,
    "max_seq_length": 24,
    "max_predictions_per_seq": 2,
    "random_seed": 99,
    "dupe_factor": 3,
    "masked_lm_prob": 0.3,
    "short_seq_prob": 0.7,
    "eval_fraction": 0.3,
    "num_workers": 5,
    "num_shards": 2,
    "provenance": True,
    "overwrite": True,
}


@pytest.fixture(scope="module")
def created(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("created")
    text, vocabulary = write_text(tmp)
    small = tmp / "small.txt"
    small.write_text("DOC1 doc2\nDOC3\n\ndoc4 doc5\nDOC6\n\ndoc7\n\ndoc8\n")

    def make(name, folder=None, **flags):
        return run(create_pretraining_data, CreateConfig, create_job, folder or tmp / name, **flags)

    given = {"input_file": text, "vocab_file": vocabulary, "max_seq_length": 32, "dupe_factor": 1}
    changed = {**CREATED, "input_file": small, "json": tmp / "table.json"}
    made = {
        "default": make("default", **given),
        "changed": make("changed", used(tmp / "changed"), **changed),
        "seeded": make("seeded", **given, random_seed=99),
        "trained": make("trained", **{**given, "vocab_file": "", "vocab_size": 60}),
        "large": make("large", **{**given, "vocab_file": "", "vocab_size": 90}),
        "kept": make("kept", used(tmp / "kept"), **given),
        "beam": make("beam", **given, runner="DirectRunner"),
        "causal": make("causal", input_file=text, objective="causal_lm", tokenizer="byte_bpe"),
    }
    assert {name for name, seen in made.items() if seen.status} == {"kept"}, made["changed"].error
    changed |= {"objective": "causal_lm", "tokenizer": "byte_bpe"}
    flags = {**changed, "vocab_file": vocabulary, "output_dir": tmp / "changed", "runner": "DirectRunner"}
    return made, flags


def of_rules(name):
    return lambda seen: {getattr(shard.records.rules, name) for shard in seen.shards}


def of_masking(name):
    return lambda seen: {getattr(shard.records.rules.masking, name) for shard in seen.shards}


def num_files(seen):
    return {split: len(content["files"]) for split, content in seen.manifest["splits"].items()}


def words_of(seen):
    return (seen.folder / "vocab.txt").read_text().split()


CREATE_CASES = {
    **{
        name: Case(of_rules(name), {CREATED[name]})
        for name in ("max_seq_length", "masked_lm_prob", "short_seq_prob")
    },
    **{
        name: Case(of_masking(name), {CREATED[name]})
        for name in ("do_whole_word_mask", "mask_replace_prob", "random_replace_prob")
    },
    "max_predictions_per_seq": Case(of_rules("max_predictions_per_seq"), {2}),
    "objective": Case(lambda seen: seen.manifest.get("objective"), "causal_lm", run="causal"),
    "tokenizer": Case(lambda seen: (seen.folder / "tokenizer.json").exists(), True, run="causal"),
    "input_file": Case(lambda seen: [entry["num_documents"] for entry in seen.manifest["inputs"]], [4]),
    "output_dir": Case(lambda seen: (seen.folder.name, len(seen.shards) > 0), ("changed", True)),
    "vocab_file": Case(
        lambda seen: words_of(seen)[5:] == [f"doc{i}" for i in range(NUM_DOCUMENTS)],
        True,
        run="default",
        other="trained",
    ),
    "vocab_size": Case(lambda seen: len(words_of(seen)), 60, run="trained", other="large"),
    "do_lower_case": Case(lambda seen: any(word.isupper() for word in words_of(seen)[5:]), True),
    "random_seed": Case(
        lambda seen: [entry["sha256"] for entry in seen.manifest["splits"]["train"]["files"]],
        DIFFERENT,
        run="seeded",
    ),
    "dupe_factor": Case(
        lambda seen: {num_passes for s in seen.shards if s.split == "train" for num_passes, _ in s.passes},
        {3},
    ),
    "eval_fraction": Case(
        lambda seen: {split: content["num_documents"] for split, content in seen.manifest["splits"].items()},
        {"train": 3, "eval": 1},
    ),
    "num_workers": Case(lambda seen: [number for number, _ in seen.jobs], [5]),
    "runner": Case(lambda seen: [runner for _, runner in seen.jobs], ["DirectRunner"], run="beam"),
    "num_shards": Case(num_files, {"train": 2, "eval": 1}),
    "provenance": Case(lambda seen: len(list(seen.folder.glob("*.provenance.npz"))), 3),
    "overwrite": Case(
        lambda seen: (seen.status, (seen.folder / "train-00007-of-00008.tfrecord").exists()),
        (0, False),
        other="kept",
    ),
    "json": Case(
        lambda seen: [row["split"] for row in json.loads(seen.given["json"].read_text())],
        ["train", "eval"],
        other="",  # the other runs wrote none
    ),
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CreateConfig)])
def test_a_setting_of_making_records_arrives(created, name):
    check(CreateConfig, CREATE_CASES, *created, name)


# Packing

PACKED = {
    "max_seq_length": 24,
    "algorithm": "spfhp",
    "max_sequences_per_pack": 5,
    "max_predictions_per_pack": 33,
    "overlong": "drop",
    "num_shards": 2,
    "provenance": True,
    "num_workers": 7,
    "overwrite": True,
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("packs")
    lengths = np.random.default_rng(0).integers(3, 17, 40)
    one = write_features(tmp / "one.tfrecord", make_features(lengths, 30))
    other = write_features(tmp / "other.tfrecord", make_features([*lengths[:20], 30], 30))
    (tmp / "histogram.json").write_text(json.dumps({"lengths": [4, 7], "counts": [30, 20]}))
    tried = []

    def make(name, folder=None, **flags):
        return run(pack_tfrecords, PackConfig, pack_job, folder or tmp / name, **flags)

    def try_none(histogram, input_file):
        tried.append((histogram, input_file))
        raise dry_run.InputError("seen")

    given = {"input_file": one, "max_seq_length": 16}
    changed = {**PACKED, "input_file": other, "json": tmp / "table.json"}
    made = {
        "default": make("default", **given),
        "changed": make("changed", used(tmp / "changed"), **changed),
        "seeded": make("seeded", **given, random_seed=99),
        "binary": make("binary", **given, masked_lm_weights="binary"),
        "other features": make("other features", input_file=one, features="input_ids:int:30"),
        "kept": make("kept", used(tmp / "kept"), **given),
        "beam": make("beam", **given, runner="DirectRunner"),
        "split": make(
            "split",
            input_file=write_causal(tmp / "causal.tfrecord", [5, 9, 30]),
            max_seq_length=6,
            split_sequences=True,
            num_rows=3,
        ),
    }
    assert {name for name, seen in made.items() if seen.status} == {"kept"}, made["changed"].error
    changed |= {"split_sequences": True, "num_rows": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "read_histogram", try_none)
        made["dry"] = make("dry", dry_run=True, histogram=tmp / "histogram.json")
    made["dry"].tried = tried
    flags = {**changed, "output_dir": tmp / "changed", "random_seed": 99, "features": "input_ids:int:30"}
    flags |= {"runner": "DirectRunner", "masked_lm_weights": "binary"}
    return made, {**flags, "dry_run": True, "histogram": tmp / "histogram.json"}


def read_files(seen):
    return sorted(seen.folder.glob("packed-*.tfrecord"))


def names_in(seen):
    """The features of the first pack."""
    path = str(read_files(seen)[0])
    return examples.feature_names(tfrecords.first_record(path), path, 1)


def length_of(name):
    """Values of a feature in the first pack."""

    def look(seen):
        path = str(read_files(seen)[0])
        features = tf.train.Example.FromString(tfrecords.first_record(path)).features.feature
        return len(features[name].int64_list.value)

    return look


def weights_of(seen):
    """The weights of predictions in every pack."""
    for path in map(str, read_files(seen)):
        for record in tfrecords.read_records(path):
            features = tf.train.Example.FromString(record).features.feature
            yield list(features[schema.MASKED_LM_WEIGHTS].float_list.value)


PACK_CASES = {
    "input_file": Case(lambda seen: [entry["num_records"] for entry in seen.manifest["inputs"]], [21]),
    "output_dir": Case(lambda seen: (seen.folder.name, len(read_files(seen))), ("changed", 2)),
    "features": Case(names_in, DIFFERENT, run="other features"),
    "max_seq_length": Case(length_of(schema.INPUT_IDS), 24),
    "algorithm": Case(lambda seen: seen.manifest["plan"]["algorithm"], "spfhp"),
    "max_sequences_per_pack": Case(length_of(schema.NEXT_SENTENCE_LABELS), 5),
    "max_predictions_per_pack": Case(length_of(schema.MASKED_LM_IDS), 33),
    "overlong": Case(lambda seen: seen.manifest["num_overlong"]["dropped"], 1),
    "split_sequences": Case(lambda seen: seen.manifest.get("split_sequences"), True, run="split"),
    "num_rows": Case(lambda seen: seen.manifest.get("num_rows"), 3, run="split"),
    "num_shards": Case(lambda seen: len(read_files(seen)), 2),
    "random_seed": Case(
        lambda seen: [entry["sha256"] for entry in seen.manifest["files"]], DIFFERENT, run="seeded"
    ),
    "masked_lm_weights": Case(
        lambda seen: sorted({weight for pack in weights_of(seen) for weight in pack}), [0, 1], run="binary"
    ),
    "provenance": Case(lambda seen: len(list(seen.folder.glob("*.provenance.npz"))), 2),
    "num_workers": Case(lambda seen: [number for number, _ in seen.jobs], [7]),
    "runner": Case(lambda seen: [runner for _, runner in seen.jobs], ["DirectRunner"], run="beam"),
    "overwrite": Case(
        lambda seen: (seen.status, (seen.folder / "train-00007-of-00008.tfrecord").exists()),
        (0, False),
        other="kept",
    ),
    "dry_run": Case(lambda seen: (seen.folder.exists(), len(seen.shards)), (False, 0), run="dry"),
    "histogram": Case(
        lambda seen: seen.tried == [(str(seen.given["histogram"]), "")], True, run="dry", other=""
    ),
    "json": Case(
        lambda seen: [row["algorithm"] for row in json.loads(seen.given["json"].read_text())],
        ["spfhp"],
        other="",  # the other runs wrote none
    ),
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PackConfig)])
def test_a_setting_of_packing_arrives(packed, name):
    check(PackConfig, PACK_CASES, *packed, name)


# Verifying


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(VerifyConfig)])
def test_a_setting_of_verifying_arrives(tmp_path, monkeypatch, name):
    calls = []

    def compare(*arguments):
        calls.append(arguments)
        return verification.Comparison(1, 1, 0, 0, ())

    monkeypatch.setattr(verification, "compare_files", compare)
    monkeypatch.setattr(verification, "find_overlong", lambda paths: f"as beside {paths}")
    paths = {"input_file": tmp_path / "in", "packed_file": tmp_path / "packs"}
    for path in paths.values():
        path.write_text("records")
    flags = {**paths, "overlong": "drop", "json": tmp_path / "table.json"}
    given = [{**paths}, flags]
    for each in given:
        argv = ["verify", *(f"--{key}={value}" for key, value in each.items())]
        assert command_line.run(verify_tfrecords.main, VerifyConfig, "", argv) == 0
    inputs, packs = ([str(path)] for path in paths.values())
    assert calls == [(inputs, packs, f"as beside {packs}"), (inputs, packs, "drop")]
    assert name in flags, f"--{name} needs an entry here: how is it seen to arrive?"
    (row,) = json.loads(flags["json"].read_text())
    assert row["result"] == "equal"
