"""From text to files: every record follows from the seed, splits never mix, mistakes end in one line."""

import dataclasses
import gzip
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from interrupts import interruptible

from data_gen import schema
from data_gen.assembly.pack_config import PackConfig
from data_gen.assembly.pack_job import pack
from data_gen.cli.command_line import run
from data_gen.cli.settings import InputError
from data_gen.create_pretraining_data import DESCRIPTION, main
from data_gen.jobs import files, runners
from data_gen.jobs.output import OutputDir
from data_gen.jobs.steps import Job
from data_gen.packing.histogram import to_json
from data_gen.records import tfrecords
from data_gen.records.provenance import find_documents, find_sources
from data_gen.text import create_job, create_steps
from data_gen.text.create_config import CreateConfig
from data_gen.text.token_corpus import TokenCorpus
from data_gen.text.tokenization import SPECIAL_TOKENS

NUM_DOCUMENTS = 30
REAL_TEXT = Path(__file__).parents[3] / "shared/data/wikipedia/enwik8_sentences.txt.gz"
REAL_VOCAB = Path(__file__).parents[3] / "shared/data/vocab/bert-base-uncased-vocab.txt"


@pytest.fixture
def text(tmp_path):
    """A text in which every word names its document, and its vocabulary: two paths."""
    rng = np.random.default_rng(0)
    documents = [
        "\n".join(" ".join([f"doc{i}"] * rng.integers(1, 12)) for _ in range(rng.integers(1, 30)))
        for i in range(NUM_DOCUMENTS)
    ]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(documents))
    vocab = tmp_path / "words.txt"
    vocab.write_text("\n".join([*SPECIAL_TOKENS, *(f"doc{i}" for i in range(NUM_DOCUMENTS))]))
    return path, vocab


def make_config(text, output_dir, **settings):
    path, vocab = text
    defaults = {"max_seq_length": 32, "dupe_factor": 2, "num_workers": 1, "num_shards": 3}
    files = {"input_file": str(path), "vocab_file": str(vocab), "output_dir": str(output_dir)}
    return CreateConfig(**{**defaults, **files, **settings})


def read_split(folder, split):
    """All features of a split: dict from name to array `[n, length]`."""
    lengths = {"S": 32, "P": 5, 1: 1}
    wanted = {name: lengths[kind] for name, kind in schema.UNPACKED_LENGTHS.items()}
    parts = []
    for path in sorted(Path(folder).glob(f"{split}-*.tfrecord")):
        for batch in tfrecords.read_batches(path):
            parts.append(tfrecords.parse_examples(batch, wanted, path, 1))
    return {name: np.concatenate([part[name] for part in parts]) for name in wanted}


def restore(features):
    """`input_ids` with the labels back in place."""
    ids = features[schema.INPUT_IDS].copy()
    rows, slots = np.nonzero(features[schema.MASKED_LM_WEIGHTS])
    ids[rows, features[schema.MASKED_LM_POSITIONS][rows, slots]] = features[schema.MASKED_LM_IDS][rows, slots]
    return ids


def read_all_bytes(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_records_manifest_and_files_agree(text, tmp_path):
    manifest = create_job.create(make_config(text, tmp_path / "out", eval_fraction=0.2))
    assert json.loads((tmp_path / "out/manifest.json").read_text()) == manifest
    assert manifest["kind"] == "unpacked"
    assert manifest["settings"]["max_predictions_per_seq"] == 5
    assert manifest["vocab_size"] == NUM_DOCUMENTS + 5
    assert (tmp_path / "out/vocab.txt").read_bytes() == text[1].read_bytes()
    assert manifest["vocab_sha256"] == hashlib.sha256(text[1].read_bytes()).hexdigest()
    assert manifest["inputs"][0]["sha256"] == hashlib.sha256(text[0].read_bytes()).hexdigest()
    names = {"manifest.json", "vocab.txt"}
    for split, content in manifest["splits"].items():
        features = read_split(tmp_path / "out", split)
        lengths = features[schema.INPUT_MASK].sum(axis=1)
        assert content["histogram"] == to_json(np.bincount(lengths, minlength=33)[1:])
        assert content["num_sequences"] == len(lengths) == sum(f["num_records"] for f in content["files"])
        for entry in content["files"]:
            data = (tmp_path / "out" / entry["name"]).read_bytes()
            assert entry["sha256"] == hashlib.sha256(data).hexdigest()
            names.add(entry["name"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert manifest["splits"]["train"]["num_documents"] == 24
    assert manifest["splits"]["eval"]["num_documents"] == 6


def test_eval_documents_never_enter_train(text, tmp_path):
    create_job.create(make_config(text, tmp_path / "out", eval_fraction=0.2, dupe_factor=3))
    found = {}
    for split in ("train", "eval"):
        features = read_split(tmp_path / "out", split)
        ids = restore(features)
        found[split] = set(np.unique(ids[ids >= len(SPECIAL_TOKENS)]).tolist())
        # and a random next is of another document, an actual one of the same
        for row, types, mask, label in zip(
            ids,
            features[schema.SEGMENT_IDS],
            features[schema.INPUT_MASK],
            features[schema.NEXT_SENTENCE_LABELS][:, 0],
            strict=True,
        ):
            words = row >= len(SPECIAL_TOKENS)
            (document_a,) = set(row[words & (types == 0) & (mask == 1)].tolist())
            (document_b,) = set(row[words & (types == 1)].tolist())
            assert (document_a != document_b) == label
    assert not found["train"] & found["eval"]
    assert len(found["train"] | found["eval"]) == NUM_DOCUMENTS


def test_bytes_depend_on_the_seed_and_not_on_the_workers(text, tmp_path):
    for name, settings in {
        "one": {},
        "two": {"num_workers": 2},
        "other seed": {"random_seed": 7},
    }.items():
        create_job.create(make_config(text, tmp_path / name, eval_fraction=0.2, **settings))
    one, two, other = (read_all_bytes(tmp_path / name) for name in ("one", "two", "other seed"))
    assert one == two
    assert one.keys() == other.keys()
    assert all(one[name] != other[name] for name in one if name != "vocab.txt")


def count_own_words(features):
    """How often each WordPiece stands in a sequence as text of its own document: int `[V]`, by a loop."""
    counts = np.zeros(NUM_DOCUMENTS + len(SPECIAL_TOKENS), int)
    for ids, types, label in zip(
        restore(features),
        features[schema.SEGMENT_IDS],
        features[schema.NEXT_SENTENCE_LABELS][:, 0],
        strict=True,
    ):
        for token, is_b in zip(ids.tolist(), types.tolist(), strict=True):
            counts[token] += token >= len(SPECIAL_TOKENS) and not (is_b and label)
    return counts[len(SPECIAL_TOKENS) :]


@pytest.mark.parametrize("is_small", [True, False], ids=["small batches", "batches as they are"])
def test_each_document_is_drawn_dupe_factor_times(text, tmp_path, monkeypatch, is_small):
    """Sentences of one word fill a sequence exactly: nothing is cut, so nothing may be missing or doubled."""
    for name, size in {"PAIRS_PER_MAPPING": 5, "SHUFFLE_TOKENS": 250, "WRITE_BATCH": 4}.items():
        monkeypatch.setattr(create_steps, name, size if is_small else getattr(create_steps, name))
    sizes = np.random.default_rng(1).integers(2, 60, NUM_DOCUMENTS)
    text[0].write_text("\n\n".join("\n".join([f"doc{i}"] * size) for i, size in enumerate(sizes)))
    settings = {"dupe_factor": 3, "eval_fraction": 0.2, "num_shards": 4}
    manifest = create_job.create(make_config(text, tmp_path / "out", **settings))
    found = {split: count_own_words(read_split(tmp_path / "out", split)) for split in ("train", "eval")}
    is_eval = found["eval"] > 0
    assert is_eval.sum() == 6
    assert found["eval"].tolist() == (sizes * is_eval).tolist()
    assert found["train"].tolist() == (3 * sizes * ~is_eval).tolist()
    for split, content in manifest["splits"].items():
        read = content["num_tokens_read"]
        assert (read, content["num_tokens_used"], content["num_tokens_cut"]) == (found[split].sum(), read, 0)


def test_a_document_as_large_as_the_corpus_gives_its_pages_back(text, tmp_path, monkeypatch):
    releases = []
    monkeypatch.setattr(create_steps, "SEQUENCES_PER_RELEASE", 4)
    monkeypatch.setattr(TokenCorpus, "release", lambda corpus: releases.append(1))
    text[0].write_text("doc0 doc1\ndoc2\n" * 200)  # one document
    manifest = create_job.create(make_config(text, tmp_path / "out", dupe_factor=1))
    assert len(releases) == manifest["splits"]["train"]["num_sequences"] // 4 > 4


def test_tokens_that_were_cut_are_counted(text, tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "data_gen")
    monkeypatch.setattr(logging.getLogger("data_gen"), "propagate", True)
    manifest = create_job.create(make_config(text, tmp_path / "out", dupe_factor=2))
    content = manifest["splits"]["train"]
    features = read_split(tmp_path / "out", "train")
    num_words = len(text[0].read_text().split())
    assert content["num_tokens_read"] == 2 * num_words
    assert content["num_tokens_used"] == count_own_words(features).sum() < 2 * num_words
    assert content["num_tokens_cut"] == 2 * num_words - content["num_tokens_used"]
    assert content["num_random_nexts"] == features[schema.NEXT_SENTENCE_LABELS].sum()
    share = f"{100 * content['num_tokens_cut'] / (2 * num_words):.1f} %"
    line = f"{content['num_tokens_cut']} of {2 * num_words} tokens of text were cut ({share})"
    # A record may arrive twice: pytest 9 listens at a logger, too, that kept to itself when the test began
    assert len({record for record in caplog.records if line in record.message}) == 1


@pytest.mark.parametrize(
    ("between", "label", "cause"),
    [("\n", 0, "the text is one document"), ("\n\n", 1, "no document has a next")],
)
def test_a_document_a_line_is_told(text, tmp_path, capsys, between, label, cause):
    lines = [" ".join([f"doc{i}"] * 200) for i in range(NUM_DOCUMENTS)]
    text[0].write_text(between.join(lines))
    arguments = {"input_file": text[0], "vocab_file": text[1], "output_dir": tmp_path / "out"}
    arguments |= {"num_workers": 1, "max_seq_length": 32, "dupe_factor": 1}
    argv = ["create", *(f"--{name}={value}" for name, value in arguments.items())]
    assert run(main, CreateConfig, DESCRIPTION, argv) == 0
    assert (read_split(tmp_path / "out", "train")[schema.NEXT_SENTENCE_LABELS] == label).all()
    error = capsys.readouterr().err
    assert re.search(
        r"warning: [89]\d % of the tokens of split train are in no sequence, because lines", error
    )
    assert f"warning: all next_sentence_labels of split train are {label}, " in error and cause in error
    assert error.count("a blank line between documents") == 1


def test_settings_arrive_where_sequences_are_drawn(text, tmp_path):
    settings = {
        "max_seq_length": 40,
        "max_predictions_per_seq": 3,
        "masked_lm_prob": 0.3,
        "short_seq_prob": 0.4,
        "do_whole_word_mask": True,
    }
    config = make_config(text, "out", random_seed=77, dupe_factor=6, num_shards=5, **settings)
    output = OutputDir(str(tmp_path))
    (tmp_path / "corpus").mkdir()
    shards, sizes = create_job.plan_shards(config, 10, output, str(tmp_path / "corpus"))
    assert len(shards) == 5 and sizes == {"train": 10}
    for shard in shards:
        assert dataclasses.asdict(shard.rules) == settings
        assert (shard.seed, shard.num_duplicates, shard.split) == (77, 6, "train")
    ends = [(shard.first, shard.last) for shard in shards]
    assert ends == [(12 * i, 12 * i + 12) for i in range(5)]


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_case_arrives_at_the_tokenizer(text, tmp_path, do_lower_case):
    text[0].write_text("DOC0 DOC1\nDOC2\n" * 9)
    create_job.create(make_config(text, tmp_path / "out", do_lower_case=do_lower_case))
    ids = restore(read_split(tmp_path / "out", "train"))
    assert (SPECIAL_TOKENS.index("[UNK]") in ids) != do_lower_case


def test_good_text_is_no_warning(text, tmp_path):
    text[0].write_text("\n\n".join("\n".join([f"doc{i} doc{i}"] * 30) for i in range(NUM_DOCUMENTS)))
    manifest = create_job.create(make_config(text, tmp_path / "out", eval_fraction=0.2))
    assert create_job.warnings_about(manifest) == []


@pytest.mark.parametrize("num_sequences, warned", [(1, False), (2, False), (40, True)])
def test_equal_labels_of_a_few_sequences_are_chance(num_sequences, warned):
    split = {"num_tokens_cut": 0, "num_tokens_read": 9, "num_random_nexts": 0, "num_documents": 1}
    lines = create_job.warnings_about({"splits": {"eval": {**split, "num_sequences": num_sequences}}})
    assert bool(lines) == warned and (not warned or "split eval" in lines[0])


def test_urls_give_the_same_bytes(text, tmp_path):
    """In and out, the vocabulary as well; `ram://` is TensorFlow's own file system in memory."""
    settings = {"provenance": True, "eval_fraction": 0.2}
    files.make_folder("ram://create")
    contents = {"text.txt": text[0].read_bytes(), "words.txt": text[1].read_bytes(), "one.txt": b"doc0 doc1"}
    for name, content in contents.items():
        with files.open_file(f"ram://create/{name}", "wb") as file:
            file.write(content)
    with pytest.raises(InputError, match="eval_fraction"):
        create_job.create(
            make_config(("ram://create/one.txt", text[1]), "ram://create/none", eval_fraction=0.2)
        )
    assert not files.exists("ram://create/none")
    create_job.create(make_config(text, tmp_path / "out", **settings))
    expected = read_all_bytes(tmp_path / "out")
    remote = ("ram://create/text.txt", "ram://create/words.txt")
    manifest = create_job.create(make_config(remote, "ram://create/out", **settings))
    assert manifest["inputs"][0]["path"] == "ram://create/text.txt"
    found = {}
    for name in files.list_names("ram://create/out"):
        with files.open_file(f"ram://create/out/{name}") as file:
            found[name] = file.read()
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name] != expected[name]} == {"manifest.json"}
    entries = {split: content["files"] for split, content in manifest["splits"].items()}
    local = json.loads(expected["manifest.json"])["splits"]
    assert entries == {split: content["files"] for split, content in local.items()}
    packing = {"max_seq_length": 32, "num_workers": 1, "num_shards": 1, "provenance": True}
    pack(
        PackConfig(input_file="ram://create/out/train-*.tfrecord", output_dir="ram://create/packs", **packing)
    )
    shard = "ram://create/packs/packed-00000-of-00001.tfrecord"
    documents = find_documents(find_sources(shard, 3), shard)
    assert documents and {document.path for document in documents} == {"ram://create/text.txt"}
    with pytest.raises(InputError, match="`output_dir` must not be the directory of an input file"):
        create_job.create(make_config(remote, "ram://create"))
    with pytest.raises(InputError, match="`output_dir` must be empty"):
        create_job.create(make_config(remote, "ram://create/out"))
    again = make_config((remote[0], ""), "ram://create/out", vocab_size=60, overwrite=True)
    assert create_job.create(again)["vocab_size"] <= 60  # trained there
    assert "train-00000-of-00003.provenance.npz" not in files.list_names("ram://create/out")


def test_a_run_behind_a_url_that_failed_goes_on(text, tmp_path, monkeypatch):
    config = make_config(text, "ram://failed/out")
    calls = []

    def fail_late(shard):
        calls.append(shard.path)
        if len(calls) == 2:
            raise OSError("network is down")
        return create_steps.write_shard(shard)

    monkeypatch.setattr(create_job, "write_shard", fail_late)
    with pytest.raises(OSError, match="network is down") as error:
        create_job.create(config)
    assert error.value.__notes__ == [
        "the same command continues with what is in ram://failed/out/.incomplete"
    ]
    assert files.list_names("ram://failed/out") == [".incomplete"]
    manifest = create_job.create(config)
    assert len(calls) == 2 + 2  # the first shard was noted
    assert ".incomplete" not in files.list_names("ram://failed/out")
    local = create_job.create(make_config(text, tmp_path / "out"))
    assert manifest["splits"] == local["splits"]


def test_duplicates_differ_and_eval_has_none(text, tmp_path):
    manifest = create_job.create(make_config(text, tmp_path / "out", eval_fraction=0.2, dupe_factor=4))
    once = create_job.create(make_config(text, tmp_path / "once", eval_fraction=0.2, dupe_factor=1))
    train, train_once = manifest["splits"]["train"], once["splits"]["train"]
    assert train["num_sequences"] > 3 * train_once["num_sequences"]
    ids = read_split(tmp_path / "out", "train")[schema.INPUT_IDS]
    assert len(np.unique(ids, axis=0)) > 3 * train_once["num_sequences"]
    assert manifest["splits"]["eval"]["num_sequences"] == once["splits"]["eval"]["num_sequences"]


def test_records_are_shuffled(text, tmp_path):
    create_job.create(make_config(text, tmp_path / "out", dupe_factor=1, num_shards=1))
    first_words = restore(read_split(tmp_path / "out", "train"))[:, 1]
    neighbours = np.mean(first_words[1:] == first_words[:-1])
    assert neighbours < 0.3  # in the order of the text: about 0.9


def test_a_vocabulary_is_trained_where_none_is_given(text, tmp_path):
    config = make_config(text, tmp_path / "out", vocab_file="", vocab_size=60)
    manifest = create_job.create(config)
    tokens = (tmp_path / "out/vocab.txt").read_text().splitlines()
    assert tokens[:5] == list(SPECIAL_TOKENS)
    assert "doc" in tokens
    assert manifest["vocab_size"] == len(tokens) <= 60
    assert manifest["settings"]["vocab_size"] == 60


def test_the_sample_corpus_is_the_input_where_none_is_given(tmp_path, monkeypatch):
    documents = [["Paths name files.", "They may be long."], ["Lists are mutable.", "Tuples are not."]]
    monkeypatch.setattr(create_job, "read_sample_documents", lambda: iter(documents))
    config = CreateConfig(output_dir=str(tmp_path / "out"), vocab_size=100, max_seq_length=16, num_workers=1)
    manifest = create_job.create(config)
    assert manifest["inputs"][0]["path"] == "embedded sample corpus"
    assert manifest["splits"]["train"]["num_documents"] == 2
    assert manifest["splits"]["train"]["num_sequences"] >= 20  # two documents, ten passes


def test_files_and_formats_mix(text, tmp_path):
    (tmp_path / "more.jsonl.gz").write_bytes(
        gzip.compress(b'{"paragraphs": ["doc1 doc1. Doc2 doc2."]}\n{"text": "doc3"}\n')
    )
    pattern = f"{text[0]},{tmp_path}/more.*"
    manifest = create_job.create(make_config(text, tmp_path / "out", input_file=pattern))
    assert [entry["path"] for entry in manifest["inputs"]] == [str(tmp_path / "more.jsonl.gz"), str(text[0])]
    assert manifest["splits"]["train"]["num_documents"] == NUM_DOCUMENTS + 2


def test_one_document(tmp_path, text):
    path = tmp_path / "one.txt"
    path.write_text("doc0 doc1 doc2\ndoc3 doc4\ndoc5\n")
    manifest = create_job.create(make_config((path, text[1]), tmp_path / "out", dupe_factor=5))
    assert manifest["splits"]["train"]["num_sequences"] >= 5
    assert not read_split(tmp_path / "out", "train")[schema.NEXT_SENTENCE_LABELS].any()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"output_dir": ""}, "`output_dir` must be given"),
        ({"masked_lm_prob": 1.0}, "`masked_lm_prob` must be between 0 and 1. Received: 1.0"),
        ({"masked_lm_prob": 0.0}, "`masked_lm_prob` must be between 0 and 1"),
        ({"max_seq_length": 7}, "`max_seq_length` must be at least 8"),
        ({"max_predictions_per_seq": -1}, "`max_predictions_per_seq` must be at least 0"),
        ({"max_predictions_per_seq": 30}, "max_predictions_per_seq=30, max_seq_length=32"),
        ({"short_seq_prob": 1.5}, "`short_seq_prob` must be at most 1.0"),
        ({"eval_fraction": 0.9}, "`eval_fraction` must be at most 0.5"),
        ({"dupe_factor": 0}, "`dupe_factor` must be at least 1"),
        ({"random_seed": 2**32}, "`random_seed` must be at most"),
        ({"random_seed": 2**64}, "`random_seed` must be at most 4294967295. Received: 18446744073709551616"),
        ({"random_seed": -1}, "`random_seed` must be at least 0. Received: -1"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(InputError, match=message):
        CreateConfig(**{"output_dir": "x", "max_seq_length": 32, **settings})


def check_mistake(capsys, arguments, message):
    """Run the command line: exit status 2, and one line that holds `message`."""
    argv = ["create_pretraining_data.py", *(f"--{name}={value}" for name, value in arguments.items())]
    assert run(main, CreateConfig, DESCRIPTION, argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("create_pretraining_data.py: error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("input_file", "{tmp}/nothing-*.txt", "`input_file` must match at least one file"),
        ("input_file", "{tmp}/blank.txt", "blank.txt must hold at least one sentence"),
        ("input_file", "{tmp}/latin.txt", "latin.txt, line 2: text must be UTF-8"),
        ("input_file", "{tmp}/bad.json", "bad.json, line 1: must be a JSON object"),
        ("input_file", "{tmp}/latin_cr.txt", "latin_cr.txt, line 3: text must be UTF-8"),
        ("input_file", "{tmp}/lone.txt", "`input_file` must hold two words or more"),
        ("input_file", "{tmp}/spaces.txt", "`input_file` must hold a word"),
        ("vocab_file", "{tmp}/nothing.txt", "`vocab_file` must match at least one file"),
        ("vocab_file", "{tmp}/no_mask.txt", "[MASK] is missing"),
        ("vocab_file", "{tmp}/special.txt", "must hold a WordPiece besides the special tokens"),
        ("vocab_file", "{tmp}/*.txt", "`vocab_file` must be one file"),
        ("output_dir", "{tmp}", "`output_dir` must not be the directory of an input file"),
        ("output_dir", "{tmp}/used", "`output_dir` must be empty"),
        ("masked_lm_prob", "many", "masked_lm_prob"),
    ],
)
def test_mistakes_end_in_one_line_and_leave_nothing(text, tmp_path, capsys, name, value, message):
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes("fine\ncaf\u00e9\n".encode("latin-1"))
    (tmp_path / "latin_cr.txt").write_bytes("fine\r\rcaf\u00e9\r".encode("latin-1"))
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "lone.txt").write_text("doc0")
    (tmp_path / "spaces.txt").write_text("\u200b")
    (tmp_path / "special.txt").write_text("\n".join(SPECIAL_TOKENS))
    (tmp_path / "no_mask.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n")
    (tmp_path / "used").mkdir()
    (tmp_path / "used/notes.md").write_text("mine")
    arguments = {"input_file": text[0], "vocab_file": text[1], "output_dir": tmp_path / "out"}
    arguments |= {"num_workers": 1, "max_seq_length": 32}
    check_mistake(capsys, {**arguments, name: value.format(tmp=tmp_path)}, message)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["notes.md"]


def test_names_that_are_not_utf_8(text, tmp_path, capsys):
    """Manifests, indexes and TensorFlow hold names as UTF-8; `caf\xe9` is Latin-1."""
    odd = os.fsdecode(b"caf\xe9")
    text[0].rename(tmp_path / f"{odd}.txt")
    arguments = {"input_file": f"{tmp_path}/*.txt", "vocab_file": text[1], "output_dir": tmp_path / "out"}
    for changes, message in (
        ({"input_file": f"{tmp_path}/caf*.txt"}, "`input_file` must match names in UTF-8."),
        ({"input_file": f"{tmp_path}/{odd}.txt"}, "`input_file` must be UTF-8"),
        ({"input_file": text[1], "output_dir": tmp_path / odd}, "`output_dir` must be UTF-8"),
    ):
        check_mistake(capsys, {**arguments, **changes}, message)
    assert not (tmp_path / "out").exists() and not (tmp_path / odd).exists()


def test_eval_needs_a_second_document(text, tmp_path, capsys):
    path = tmp_path / "one.txt"
    path.write_text("doc0 doc1\ndoc2")
    arguments = {"input_file": path, "vocab_file": text[1], "output_dir": tmp_path / "out"}
    check_mistake(capsys, {**arguments, "eval_fraction": 0.1}, "must be 0 for a text of one document")
    assert not (tmp_path / "out").exists()


def test_a_worker_that_fails_leaves_no_record(text, tmp_path, monkeypatch):
    def fail(shard):
        raise OSError("no space left")

    monkeypatch.setattr(create_job, "write_shard", fail)
    with pytest.raises(OSError, match="no space"):
        create_job.create(make_config(text, tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".incomplete"]


def test_overwrite_replaces_the_records(text, tmp_path):
    create_job.create(make_config(text, tmp_path / "out", num_shards=5))
    create_job.create(make_config(text, tmp_path / "out", num_shards=2, overwrite=True))
    assert len(list((tmp_path / "out").glob("*.tfrecord"))) == 2


def test_command_prints_a_table_and_writes_it(text, tmp_path, capsys):
    arguments = {"input_file": text[0], "vocab_file": text[1], "output_dir": tmp_path / "out"}
    arguments |= {"num_workers": 1, "max_seq_length": 32, "json": tmp_path / "table.json"}
    argv = ["create", *(f"--{name}={value}" for name, value in arguments.items())]
    assert run(main, CreateConfig, DESCRIPTION, argv) == 0
    (row,) = json.loads((tmp_path / "table.json").read_text())
    assert row["split"] == "train" and row["documents"] == NUM_DOCUMENTS
    lengths = read_split(tmp_path / "out", "train")[schema.INPUT_MASK].sum(axis=1)
    assert row["tokens"] == lengths.sum()
    assert row["mean length"] == pytest.approx(lengths.mean())
    assert row["padding"] == pytest.approx(1 - lengths.mean() / 32)
    assert "mean length" in capsys.readouterr().out


def test_help_and_interrupt(tmp_path):
    program = [sys.executable, str(Path(create_job.__file__).parents[1] / "create_pretraining_data.py")]
    output = subprocess.run([*program, "--help"], capture_output=True, text=True, check=True).stdout
    assert "--do_whole_word_mask (default: false)" in output
    # parsing the sample corpus takes seconds: time to interrupt
    run_dir = tmp_path / "out"
    with interruptible():
        process = subprocess.Popen([*program, f"--output_dir={run_dir}"], stderr=subprocess.PIPE, text=True)
    begun = run_dir / ".incomplete" / "work" / "identity.json"
    while process.poll() is None and not begun.exists():
        pass
    try:
        time.sleep(1)  # into the parsing, where the garbage collector calls back all the time
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert "interrupted; the same command continues" in error and "Traceback" not in error
    assert begun.exists()


@pytest.mark.slow
@pytest.mark.skipif(not REAL_TEXT.exists(), reason=f"needs {REAL_TEXT}")
def test_real_text_has_berts_mean_length(tmp_path):
    with gzip.open(REAL_TEXT, "rt") as file:
        (tmp_path / "text.txt").write_text(file.read(3_000_000))
    settings = {"max_seq_length": 512, "dupe_factor": 1, "short_seq_prob": 0.0}
    config = make_config((tmp_path / "text.txt", REAL_VOCAB), tmp_path / "out", **settings)
    (row,) = create_job.summarize(create_job.create(config))
    # google-research/bert's rules in a plain loop give 423 for the whole text
    assert 400 < row["mean length"] < 460


@pytest.mark.parametrize(
    ("limit", "expected"), [(2**24, [1]), (10, [runners.num_cores()])], ids=["little", "much"]
)
def test_processes_are_started_where_they_pay(text, tmp_path, monkeypatch, limit, expected):
    found = []

    class WatchedJob(Job):
        def __init__(self, work_folder, num_workers, runner):
            found.append(num_workers)
            super().__init__(work_folder, 1, runner)

    monkeypatch.setattr(create_job, "Job", WatchedJob)
    assert create_job.TEXT_BYTES_THAT_PAY == 2**24
    monkeypatch.setattr(create_job, "TEXT_BYTES_THAT_PAY", limit)
    create_job.create(make_config(text, tmp_path / "out", num_workers=0))
    assert found == expected
