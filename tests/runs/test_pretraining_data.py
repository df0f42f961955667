"""Manifests beside a run's records, behind a URL as on this machine."""

import contextlib
import dataclasses
import itertools
import json
import os
from types import SimpleNamespace

import next_tokens
import numpy as np
import pytest
from packs import random_packs, write_packs
from tiny import CONFIG, MAX_SEQ_LENGTH, manifest_of, write_data
from unpacked_records import make_features, write_features

from bert_packed.architectures.registry import OBJECTIVE_HEADS
from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.data import input_pipeline
from bert_packed.data.batches import CheckedBatches
from bert_packed.objectives.pretraining import choose_objective
from bert_packed.records.tfrecords import scan_file
from bert_packed.runs.pretraining import Run
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.runs.pretraining_data import check_fits, read_data, read_eval_data, train_batches
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack

COUNTS = (9, 6)


@pytest.fixture
def root(tmp_path):
    """A folder behind a URL, in memory; the records of other tests are files of this machine."""
    folder = f"memory://training-{tmp_path.name}"
    yield folder
    storage.remove_folder(folder)


@pytest.fixture
def place(root, tmp_path):
    """Function that puts two files of packs and their manifest into a folder of `root`: its glob."""

    def put(name, **changes):
        made = tmp_path / "made" / name
        made.mkdir(parents=True)
        folder = f"{root}/{name}"
        storage.make_folder(folder)
        listed = []
        for path, count in zip(write_data(made), COUNTS, strict=True):
            target = f"{folder}/{os.path.basename(path)}"
            with open(path, "rb") as source, storage.open_file(target, "wb") as copy:
                copy.write(source.read())
            sha256 = scan_file(path).sha256
            listed.append({"name": os.path.basename(path), "num_records": count, "sha256": sha256})
        claims = {"vocab_size": CONFIG.vocab_size, "vocab_sha256": "aa", "files": listed}
        manifest = manifest_of(**claims | changes)
        storage.write_text(f"{folder}/manifest.json", json.dumps(manifest))
        return f"{folder}/*.tfrecord"

    return put


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """The folder that `out` is in."""
    monkeypatch.chdir(tmp_path)


def config(**changes):
    return PretrainingConfig(output_dir="out", bert_config_file="tiny", **changes)


def read(**flags):
    return read_data(config(**flags))


def assert_refused(message, **flags):
    with pytest.raises(InputError, match=message):
        read(**flags)


def test_records_without_next_sentences_are_for_mlm(place):
    made_for_mlm = place("made for mlm", objective="mlm")
    for pattern in (made_for_mlm, place("made for both")):
        assert read(input_file=pattern, objective="mlm").train.num_rows == 0
    message = r"`input_file` must hold next-sentence labels .*, made by --obj.*=mlm"
    assert_refused(message, input_file=made_for_mlm)


def test_what_a_manifest_says_is_known(place):
    pattern = place("a")
    data = read(input_file=pattern, packing_correction="betas")
    assert data.train.packing_factor == 36 / 15 and data.num_packs == 15
    assert data.facts["data"]["vocabularies"] == ["aa"]
    assert data.facts["data"]["longest_sequence"] == data.train.longest > 0
    assert (data.train.vocab_size, data.train.longest) == (CONFIG.vocab_size, 6)
    assert [entry["path"].rpartition("/")[0] for entry in data.inputs["input_file"]] == [
        pattern.rpartition("/")[0]
    ] * 2
    batches = input_pipeline.train_batches(
        data.train.index, data.train.spec, 15, seed=1, shuffle_buffer_size=4
    )
    batch = next(CheckedBatches(batches, data.train.files, data.train.spec, CONFIG))
    assert len(np.unique(batch["token_ids"], axis=0)) == 15


def test_two_vocabularies_are_refused(place):
    held_out = place("b", vocab_sha256="bb")
    message = r"must be of one vocabulary.*aa.*bb"
    assert_refused(message, input_file=place("a"), eval_input_file=held_out)


def test_facts_are_those_of_all_folders(place):
    more = {"num_packs": 5, "num_sequences": 30, "vocab_size": 40, "histogram": {"lengths": [9]}}
    names = ",".join([place("a"), place("b", **more)])
    train = read(input_file=names, packing_correction="betas").train
    # The mean of the two folders' factors, 2.4 and 6, would be wrong
    assert train.packing_factor == 66 / 20
    assert (train.vocab_size, train.longest) == (40, 9)  # the largest, in the second folder


@pytest.mark.parametrize("name", ["input_file", "eval_input_file"])
def test_a_length_that_is_claimed_is_that_of_all_packs(place, tmp_path, name):
    short = str(tmp_path / "short.tfrecord")
    write_packs(short, random_packs(np.random.default_rng(0), 3, 12), 12)
    files = {"input_file": place("a"), "eval_input_file": place("b"), "max_seq_length": MAX_SEQ_LENGTH}
    read(**files)
    message = f"`max_seq_length` must be that of the packs of `{name}`, 12."
    assert_refused(message, **files | {name: short})


@pytest.mark.parametrize("kind", ["none", "unpacked"])
def test_the_factor_is_unknown_without_a_manifest(place, root, kind):
    names = ",".join([place("a"), place("b", kind=kind, splits={"train": {"files": []}})])
    if kind == "none":
        storage.remove(f"{root}/b/manifest.json")
    assert read(input_file=names).train.packing_factor is None
    message = "`packing_correction` must be none where no manifest"
    assert_refused(message, input_file=names, packing_correction="betas")


@pytest.mark.parametrize(
    "held_out, model, rule",
    [
        ({}, {"vocab_size": 30}, "vocabulary of `input_file` must be at most vocab_size=30 of tiny.* 31"),
        ({}, {"max_position_embeddings": 5}, "longest sequence of `input_file` must be at most .*=5 .* 6"),
        # What these records themselves hold fits: only the manifest says so
        ({"vocab_size": 32}, {}, "vocabulary of `eval_input_file` must be at most vocab_size=31"),
        ({"histogram": {"lengths": [25], "counts": [36]}}, {}, "longest .* `eval_input_file` .*=24 .* 25"),
    ],
)
def test_records_larger_than_the_model_are_refused(place, held_out, model, rule):
    settings = config(input_file=place("a"), eval_input_file=place("b", **held_out))
    data = read_data(settings)
    with pytest.raises(InputError, match=rule):
        check_fits(data, dataclasses.replace(CONFIG, **model), settings)


def test_packs_are_compared_with_the_same_sequences(place, root, tmp_path):
    rng, manifest = np.random.default_rng(0), tmp_path / "one" / "manifest.json"
    for name, length in (("one", MAX_SEQ_LENGTH), ("short", MAX_SEQ_LENGTH // 2)):
        (tmp_path / name).mkdir()
        write_packs(tmp_path / name / "x.tfrecord", random_packs(rng, 3, length, 1), length, num_slots=1)
    given = {"input_file": place("a"), "unpacked_input_file": str(tmp_path / "one" / "x.tfrecord")}
    assert read(**given).unpacked.spec.max_sequences_per_pack == 1
    claims = {"kind": "packed", "num_packs": 36}
    manifest.write_text(json.dumps(claims | {"num_sequences": 36}))
    read(**given)
    manifest.write_text(json.dumps(claims | {"num_sequences": 35}))
    assert_refused("must hold the sequences of `input_file`", **given)
    for other in (place("b"), str(tmp_path / "short" / "x.tfrecord")):
        message = "must hold packs of one sequence and the length"
        assert_refused(message, **given | {"unpacked_input_file": other})
    storage.remove(f"{root}/a/manifest.json")
    assert_refused("`unpacked_input_file` needs the packing factor of `input_file`", **given)


@pytest.mark.parametrize("entry", [{"sha256": "ab"}, {"num_records": 8}, {"num_records": 10}])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("kind", ["trains", "held out", "evaluates alone"])
def test_a_file_must_be_what_its_manifest_says(place, root, kind, is_known, entry):
    """A run would train, or score, on a part if there were fewer packs than were made.

    Files that are known were scanned by an earlier start, when the manifest was right.
    """
    files = {"input_file": place("a"), "eval_input_file": place("b")}
    if is_known:
        read(**files)
    path = f"{root}/{'a' if kind == 'trains' else 'b'}/manifest.json"
    manifest = json.loads(storage.read_text(path))
    manifest["files"][0] |= entry
    storage.write_text(path, json.dumps(manifest))
    find, settings = read_data, config(**files)
    if kind == "evaluates alone":
        find, settings = read_eval_data, dataclasses.replace(settings, do_train=False)
    with pytest.raises(InputError, match=r"packed-0\.tfrecord must .*, as the manifest\.json beside it says"):
        find(settings)


@pytest.mark.parametrize("objective", OBJECTIVE_HEADS)
def test_an_objective_refuses_other_architectures(objective):
    own, other, theirs = CONFIG, next_tokens.CONFIG, r"a BERT .*\. Received: a Mamba"
    if objective == "causal_lm":
        own, other, theirs = next_tokens.CONFIG, CONFIG, r"a Mamba .*\. Received: a BERT"
    flags = config(input_file="records", objective=objective)
    model = choose_objective(objective, own, flags).build_model(own, 0)
    assert model.head == OBJECTIVE_HEADS[objective]
    with pytest.raises(InputError, match=f"`bert_config_file` must be {theirs}"):
        choose_objective(objective, other, flags)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Globs of packs with their plans: all of one folder, and some of another's."""
    folder, patterns = tmp_path_factory.mktemp("planned"), []
    for seed, files in ((1, "packed-*"), (2, "packed-*[12]-of*")):
        lengths = np.random.default_rng(seed).integers(2, MAX_SEQ_LENGTH + 1, 60)
        path = write_features(
            folder / f"{seed}.tfrecord", make_features(lengths, MAX_SEQ_LENGTH, vocab_size=31)
        )
        given = {"input_file": path, "output_dir": str(folder / str(seed)), "random_seed": seed}
        given |= {"max_sequences_per_pack": 4, "max_predictions_per_pack": 16}
        pack(PackConfig(max_seq_length=MAX_SEQ_LENGTH, num_shards=3, num_workers=1, **given))
        patterns.append(f"{folder / str(seed)}/{files}.tfrecord")
    return ",".join(patterns)


def planned_run(planned, **changes):
    sizes = {"train_batch_size": 16, "micro_batch_size": 8, "shuffle_buffer_size": 30}
    settings = config(input_file=planned, **sizes, **changes)
    return Run(settings, data=read_data(settings), model_config=CONFIG)


def read_steps(run, count, first_step=0, index=0, num=1):
    """The tokens of some steps, as one of several processes has them: int array `[count, packs, S]`."""
    run = dataclasses.replace(run, processes=SimpleNamespace(index=index, num=num))
    with contextlib.closing(train_batches(run, first_step)) as ahead:
        return np.array([batch["token_ids"] for batch in itertools.islice(ahead, count)])


def test_plans_say_how_many_pairs_of_tokens_are_in_each_pack(planned):
    """A folder of which some files are left out, or whose seed is another's, would count other packs."""
    train = read(input_file=planned).train
    (batch, _), *_ = input_pipeline.chosen_packs(train.index, train.spec, np.arange(train.index.num_packs))
    slots = np.arange(train.spec.max_sequences_per_pack + 1)  # 0 is padding
    wanted = ((batch["sequence_ids"][:, :, None] == slots).sum(axis=1) ** 2).sum(axis=1)
    assert len({*train.plans[1]}) == 2 and len({*wanted.tolist()}) > 9
    packs = np.random.default_rng(0).permutation(len(wanted))
    assert train.count_pairs(packs).tolist() == wanted[packs].tolist()


@pytest.mark.parametrize("growth", [{}, {"initial_batch_size": 8, "batch_warmup_steps": 2}])
def test_processes_share_dealt_steps_from_any_step_on(planned, growth):
    """A step has the sequences of one that was not dealt, whatever processes and wherever the run goes on."""
    plain, dealt = planned_run(planned, **growth), planned_run(planned, **growth, balanced_devices=4)
    before, whole = read_steps(plain, 5), read_steps(dealt, 5)
    assert [sorted(step.tolist()) for step in whole] == [sorted(step.tolist()) for step in before]
    assert not np.array_equal(before, whole)
    parts = [read_steps(dealt, 3, 2, index, 2) for index in range(2)]
    joined = np.concatenate([part.reshape(3, 2, 4, -1) for part in parts], axis=2)
    assert joined.reshape(whole[2:].shape).tolist() == whole[2:].tolist()


def test_what_cannot_be_dealt_is_refused(place, planned):
    for pattern, num_devices, rule in (
        (planned, 3, "must divide a micro-batch, of 8 packs. Received: 3."),
        (place("a"), 2, "must be 0 where no manifest.json .* Received: 2, for .*packed-0"),
    ):
        sizes = {"train_batch_size": 8, "balanced_devices": num_devices}
        assert_refused(f"`balanced_devices` {rule}", input_file=pattern, **sizes)


def test_processes_and_later_runs_must_have_the_same_plans(planned):
    """By other plans a process would read packs that another one has, too."""
    runs = [planned_run(planned, balanced_devices=num_devices) for num_devices in (0, 2, 2, 2)]
    # These plans are changed where they are
    for manifest in runs[2].data.train.manifests:
        manifest["plan"]["notes"] = ["made again"]
    for manifest in runs[3].data.train.manifests:
        manifest["settings"]["random_seed"] = 77
    plans = [run._facts()["data"].get("plans") for run in runs]
    assert plans[0] is None and len({*plans[1:]} - {None}) == 3
