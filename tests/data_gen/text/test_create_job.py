"""Records of text: every record follows from the seed, splits never mix, what is cut is counted."""

import hashlib
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from text_files import NUM_DOCUMENTS, count_words, make_config, read_split, restore, write_text

from bert_packed import schema
from bert_packed.packing.histogram import to_json
from bert_packed.records.provenance import find_documents, provenance_path
from bert_packed.text.tokenization import SPECIAL_TOKENS
from data_gen.text import create_job, create_steps


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


def test_records_manifest_and_files_agree(text, tmp_path):
    manifest = create_job.create(make_config(text, tmp_path / "out", eval_fraction=0.2))
    assert json.loads((tmp_path / "out/manifest.json").read_text()) == manifest
    assert manifest["kind"] == "unpacked"
    assert not {"objective", "tokenizer"} & (manifest.keys() | manifest["settings"].keys())
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


@pytest.mark.parametrize("is_small", [True, False], ids=["small batches", "batches as they are"])
def test_each_document_is_drawn_dupe_factor_times_and_traced(text, tmp_path, monkeypatch, is_small):
    """Sentences of one word fill a sequence exactly: nothing is cut, so nothing may be missing or doubled."""
    for name, size in {"PAIRS_AT_ONCE": 5, "SHUFFLE_TOKENS": 250, "WRITE_BATCH": 4}.items():
        monkeypatch.setattr(create_steps, name, size if is_small else getattr(create_steps, name))
    sizes = np.random.default_rng(1).integers(2, 60, NUM_DOCUMENTS)
    documents = ["\n".join([f"doc{i}"] * size) for i, size in enumerate(sizes)]
    for name, some in (("a", documents[:10]), ("b", documents[10:])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(some))
    settings = {"dupe_factor": 3, "eval_fraction": 0.2, "num_shards": 4, "provenance": True}
    manifest = create_job.create(make_config((f"{tmp_path}/?.txt", text[1]), tmp_path / "out", **settings))
    features = {split: read_split(tmp_path / "out", split) for split in ("train", "eval")}
    found, borrowed = ({split: count_words(features[split])[i] for split in features} for i in range(2))
    is_eval = found["eval"] > 0
    assert is_eval.sum() == 6
    assert found["eval"].tolist() == (sizes * is_eval).tolist()
    assert found["train"].tolist() == (3 * sizes * ~is_eval).tolist()
    # random nexts do not mix splits either
    assert borrowed["train"][~is_eval].all() and not borrowed["train"][is_eval].any()
    assert borrowed["eval"].any() and not borrowed["eval"][~is_eval].any()
    for split, content in manifest["splits"].items():
        read = content["num_tokens_read"]
        assert (read, content["num_tokens_used"], content["num_tokens_cut"]) == (found[split].sum(), read, 0)
        paths = [str(tmp_path / "out" / entry["name"]) for entry in content["files"]]
        numbers = [range(1, entry["num_records"] + 1) for entry in content["files"]]
        records = [(path, n) for path, some in zip(paths, numbers, strict=True) for n in some]
        origins = [(Path(d.path).name, d.number) for d in find_documents(records)]
        # the first word of A names the document; batches and shards are shuffled each for itself
        first_words = restore(features[split])[:, 1] - len(SPECIAL_TOKENS)
        neighbours = np.mean(first_words[1:] == first_words[:-1])
        assert is_small or split == "eval" or neighbours < 0.3  # in the order of drawing: about 0.9
        assert origins == [("a.txt", i + 1) if i < 10 else ("b.txt", i - 9) for i in first_words.tolist()]
        duplicates = np.concatenate([np.load(provenance_path(path))["duplicates"] for path in paths])
        drawn = set(zip(first_words.tolist(), duplicates.tolist(), strict=True))
        num_passes = 3 if split == "train" else 1
        assert drawn == {(i, d) for i in np.flatnonzero(found[split]).tolist() for d in range(num_passes)}


def test_tokens_that_were_cut_are_counted(text, tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "data_gen")
    monkeypatch.setattr(logging.getLogger("data_gen"), "propagate", True)
    manifest = create_job.create(make_config(text, tmp_path / "out", dupe_factor=2))
    content = manifest["splits"]["train"]
    features = read_split(tmp_path / "out", "train")
    num_words = len(text[0].read_text().split())
    assert content["num_tokens_read"] == 2 * num_words
    assert content["num_tokens_used"] == count_words(features)[0].sum() < 2 * num_words
    assert content["num_tokens_cut"] == 2 * num_words - content["num_tokens_used"]
    assert content["num_random_nexts"] == features[schema.NEXT_SENTENCE_LABELS].sum()
    share = f"{100 * content['num_tokens_cut'] / (2 * num_words):.1f} %"
    line = f"{content['num_tokens_cut']} of {2 * num_words} tokens of text were cut ({share})"
    # A record may arrive twice: by the root and, if pytest 9 found one that does not propagate, by the logger
    assert len({record for record in caplog.records if line in record.message}) == 1


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_case_arrives_at_the_tokenizer(text, tmp_path, do_lower_case):
    text[0].write_text("DOC0 DOC1\nDOC2\n" * 9)
    create_job.create(make_config(text, tmp_path / "out", do_lower_case=do_lower_case))
    ids = restore(read_split(tmp_path / "out", "train"))
    assert (SPECIAL_TOKENS.index("[UNK]") in ids) != do_lower_case


@pytest.mark.parametrize("objective", ["mlm_nsp", "causal_lm"])
def test_the_sample_corpus_is_the_input_where_none_is_given(tmp_path, monkeypatch, objective):
    documents = [["Paths name files.", "They may be long."], ["Lists are mutable.", "Tuples are not."]]
    monkeypatch.setattr(create_job, "read_sample_documents", lambda: iter(documents))
    config = make_config(("", ""), tmp_path / "out", vocab_size=100, objective=objective, dupe_factor=10)
    manifest = create_job.create(config)
    assert manifest["inputs"][0]["path"] == "embedded sample corpus"
    train = manifest["splits"]["train"]
    assert train["num_documents"] == 2
    if objective == "causal_lm":
        assert train["num_bytes"] == sum(len("\n".join(document)) for document in documents)
    else:
        assert train["num_sequences"] >= 20  # two documents, ten passes
