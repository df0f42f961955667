"""Settings of the commands that make and pack records in effect: on files, and on arguments of steps."""

import importlib.util
import json

import numpy as np
import pytest
from causal_files import write_causal
from recorded_calls import arguments, run
from text_files import NUM_DOCUMENTS, write_text
from unpacked_records import make_features, read_records, write_features

from bert_packed import schema
from bert_packed.records.examples import Example
from bert_packed.records.provenance import read_manifest
from bert_packed.text.tokenization import SPECIAL_TOKENS
from data_gen import create_pretraining_data, pack_job, pack_steps, pack_tfrecords
from data_gen.jobs import runners
from data_gen.jobs.steps import Job
from data_gen.pack_config import PackConfig
from data_gen.text import create_job, create_steps
from data_gen.text.create_config import CreateConfig

OLD_FILE = "train-00007-of-00008.tfrecord"


def run_job(command, config_class, job, steps, output_dir, **flags):
    """A command under flags (None: not given), its shards recorded, all in this process."""
    flags = {name: value for name, value in flags.items() if value is not None}
    stand_in = {(job, "Job"): lambda folder, *_: Job(folder)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runners.importlib.util, "find_spec", lambda name: importlib.util)  # all is installed
        shards = [(steps, "write_shard")]
        seen = run(command.main, config_class, shards, stand_in, output_dir=output_dir, **flags)
    seen.folder, seen.manifest = output_dir, read_manifest(output_dir)
    seen.shards = arguments(seen, "write_shard", "shard")
    return seen


def used(folder):
    """A folder that holds records of another run."""
    folder.mkdir()
    (folder / OLD_FILE).write_text("old")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "small.txt").write_text("DOC1 doc2\nDOC3\n\ndoc4 doc5\nDOC6\n\ndoc7\n\ndoc8\n")
    return folder, *write_text(folder)


@pytest.fixture(scope="module")
def create(text, tmp_path_factory):
    def make(folder=None, **flags):
        usual = {"input_file": text[1], "vocab_file": text[2], "max_seq_length": 32, "dupe_factor": 1}
        folder = folder or tmp_path_factory.mktemp("records") / "out"
        return run_job(
            create_pretraining_data, CreateConfig, create_job, create_steps, folder, **usual | flags
        )

    return make


def words_of(seen):
    return (seen.folder / "vocab.txt").read_text().split()


def test_settings_of_making_records(create, text, tmp_path):
    seen = create(
        used(tmp_path / "out"),
        input_file=text[0] / "small.txt",
        vocab_file=None,
        vocab_size=60,
        do_lower_case=False,
        do_whole_word_mask=True,
        mask_replace_prob=0.5,
        random_replace_prob=0.25,
        max_seq_length=24,
        max_predictions_per_seq=2,
        random_seed=99,
        dupe_factor=3,
        masked_lm_prob=0.3,
        short_seq_prob=0.7,
        eval_fraction=0.3,
        num_workers=5,
        num_shards=2,
        provenance=True,
        overwrite=True,
        json=tmp_path / "table.json",
    )
    assert seen.status == 0 and not (seen.folder / OLD_FILE).exists(), seen.error
    for shard in seen.shards:
        rules, masking = shard.records.rules, shard.records.rules.masking
        assert (rules.max_seq_length, rules.masked_lm_prob, rules.short_seq_prob) == (24, 0.3, 0.7)
        assert rules.max_predictions_per_seq == 2
        assert masking.do_whole_word_mask
        assert (masking.mask_replace_prob, masking.random_replace_prob) == (0.5, 0.25)
    splits = seen.manifest["splits"]
    assert {split: its["num_documents"] for split, its in splits.items()} == {"train": 3, "eval": 1}
    assert seen.manifest["sources"][0]["splits"]["train"]["num_readings"] == 3 * 3
    assert {split: len(its["files"]) for split, its in splits.items()} == {"train": 2, "eval": 1}
    assert [entry["num_documents"] for entry in seen.manifest["inputs"]] == [4]
    words = words_of(seen)
    assert words[:5] == list(SPECIAL_TOKENS) and any(word.isupper() for word in words[5:])
    assert seen.manifest["vocab_size"] == len(words) <= seen.manifest["settings"]["vocab_size"] == 60
    assert [list(call.values())[1:] for call in seen.calls["Job"]] == [[5, "local"]]
    assert len(list(seen.folder.glob("*.provenance.npz"))) == 3
    assert [row["split"] for row in json.loads((tmp_path / "table.json").read_text())] == ["train", "eval"]


@pytest.mark.parametrize("command", ["create", "pack"])
def test_files_that_are_there_are_kept(request, tmp_path, command):
    seen = request.getfixturevalue(command)(used(tmp_path / "out"))
    assert seen.status == 2 and (seen.folder / OLD_FILE).exists()


def test_vocabulary_seed_and_runner_of_making_records(create):
    created, other = create(), create(random_seed=99, runner="DirectRunner")
    assert words_of(created)[5:] == [f"doc{i}" for i in range(NUM_DOCUMENTS)]
    assert [list(seen.calls["Job"][0].values())[2] for seen in (created, other)] == ["local", "DirectRunner"]
    files = [seen.manifest["splits"]["train"]["files"] for seen in (created, other)]
    assert files[0] != files[1]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder, lengths = tmp_path_factory.mktemp("unpacked"), np.random.default_rng(0).integers(3, 17, 40)
    write_features(folder / "one.tfrecord", make_features(lengths, 30))
    write_features(folder / "other.tfrecord", make_features([*lengths[:20], 30], 30))
    write_causal(folder / "causal.tfrecord", [5, 9, 30])
    return folder


@pytest.fixture(scope="module")
def pack(inputs, tmp_path_factory):
    def make(folder=None, name="one", **flags):
        flags = {"input_file": inputs / f"{name}.tfrecord", "max_seq_length": 16, **flags}
        folder = folder or tmp_path_factory.mktemp("packs") / "out"
        return run_job(pack_tfrecords, PackConfig, pack_job, pack_steps, folder, **flags)

    return make


def files_of(seen):
    return sorted(map(str, seen.folder.glob("packed-*.tfrecord")))


def packs_of(seen):
    """The features of every pack."""
    for path in files_of(seen):
        for record in read_records(path):
            yield Example.FromString(record).features.feature


def test_settings_of_packing(pack, tmp_path):
    seen = pack(
        used(tmp_path / "out"),
        name="other",
        max_seq_length=24,
        algorithm="spfhp",
        max_sequences_per_pack=5,
        max_predictions_per_pack=33,
        overlong="drop",
        num_shards=2,
        provenance=True,
        num_workers=7,
        overwrite=True,
        json=tmp_path / "table.json",
    )
    assert seen.status == 0 and not (seen.folder / OLD_FILE).exists(), seen.error
    first = next(packs_of(seen))
    sizes = {schema.INPUT_IDS: 24, schema.NEXT_SENTENCE_LABELS: 5, schema.MASKED_LM_IDS: 33}
    assert {name: len(first[name].int64_list.value) for name in sizes} == sizes
    assert [entry["num_records"] for entry in seen.manifest["inputs"]] == [21]
    assert seen.manifest["plan"]["algorithm"] == "spfhp" and seen.manifest["num_overlong"]["dropped"] == 1
    assert len(files_of(seen)) == len(list(seen.folder.glob("*.provenance.npz"))) == 2
    assert [list(call.values())[1] for call in seen.calls["Job"]] == [7]
    assert [row["algorithm"] for row in json.loads((tmp_path / "table.json").read_text())] == ["spfhp"]


def test_weights_seed_and_runner_of_packing(pack):
    packed, other = pack(), pack(random_seed=99, runner="DirectRunner", masked_lm_weights="binary")
    weights = [
        {w for one in packs_of(seen) for w in one[schema.MASKED_LM_WEIGHTS].float_list.value}
        for seen in (packed, other)
    ]
    assert weights[1] == {0, 1} and max(weights[0]) > 1
    assert [list(seen.calls["Job"][0].values())[2] for seen in (packed, other)] == ["local", "DirectRunner"]
    assert packed.manifest["files"] != pack(random_seed=99).manifest["files"]
