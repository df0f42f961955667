"""The command that makes records of text: files here and behind URLs, processes, mistakes in one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from interrupts import interruptible
from recorded_calls import assert_refused, run
from text_files import NUM_DOCUMENTS, make_config, read_split, write_text

from bert_packed import schema
from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records.provenance import find_documents, find_sources
from data_gen.create_pretraining_data import main
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.text import create_job
from data_gen.text.create_config import CreateConfig


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


@pytest.mark.parametrize(
    ("between", "label", "cause"),
    [("\n", 0, "the text is one document"), ("\n\n", 1, "no document has a next")],
)
def test_a_document_a_line_is_told(text, tmp_path, between, label, cause):
    text[0].write_text(between.join(" ".join([f"doc{i}"] * 200) for i in range(NUM_DOCUMENTS)))
    seen = run(main, CreateConfig, **flags_of(text, tmp_path / "out", dupe_factor=1))
    assert (read_split(tmp_path / "out", "train")[schema.NEXT_SENTENCE_LABELS] == label).all()
    warning = r"warning: [89]\d % of the tokens of split train are in no sequence, because lines"
    assert seen.status == 0 and re.search(warning, seen.error) and cause in seen.error
    assert f"warning: all next_sentence_labels of split train are {label}, " in seen.error
    assert seen.error.count("a blank line between documents") == 1


def test_outputs_behind_urls(text, tmp_path):
    """What `tests/data_gen/jobs/test_steps.py` has not: mistakes, traces, files that are replaced."""
    storage.make_folder("memory://create")
    contents = {"text.txt": text[0].read_bytes(), "words.txt": text[1].read_bytes(), "one.txt": b"doc0 doc1"}
    for name, content in contents.items():
        with storage.open_file(f"memory://create/{name}", "wb") as file:
            file.write(content)
    remote, out = ("memory://create/text.txt", "memory://create/words.txt"), "memory://create/out"
    with pytest.raises(InputError, match="eval_fraction"):
        create_job.create(make_config(("memory://create/one.txt", text[1]), out, eval_fraction=0.2))
    assert not storage.exists(out)
    create_job.create(make_config(remote, out, provenance=True))
    packing = {"max_seq_length": 32, "num_workers": 1, "num_shards": 1, "provenance": True}
    pack(PackConfig(f"{out}/train-*.tfrecord", output_dir="memory://create/packs", **packing))
    shard = "memory://create/packs/packed-00000-of-00001.tfrecord"
    documents = find_documents(find_sources(shard, 3), shard)
    assert documents and {document.path for document in documents} == {"memory://create/text.txt"}
    for folder, message in (("memory://create", "not be the directory of an input file"), (out, "be empty")):
        with pytest.raises(InputError, match=f"`output_dir` must {message}"):
            create_job.create(make_config(remote, folder))
    again = make_config((remote[0], ""), out, vocab_size=60, overwrite=True)
    assert create_job.create(again)["vocab_size"] <= 60  # trained there
    assert "train-00000-of-00003.provenance.npz" not in storage.list_names(out)


def flags_of(text, output_dir, **changes):
    files = {"input_file": text[0], "vocab_file": text[1], "output_dir": output_dir}
    return {**files, "num_workers": 1, "max_seq_length": 32, **changes}


ODD = os.fsdecode(b"caf\xe9")  # in Latin-1, where manifests, indexes and TensorFlow hold names as UTF-8
MISTAKES = [
    ({"input_file": "{tmp}/blank.txt"}, "blank.txt must hold at least one sentence"),
    ({"input_file": "{tmp}/lone.txt"}, "`input_file` must hold two words or more"),
    ({"input_file": "{tmp}/spaces.txt"}, "`input_file` must hold a word"),
    ({"input_file": "{tmp}/one.txt", "eval_fraction": 0.1}, "must be 0 for a text of one document"),
    ({"vocab_file": "{tmp}/no_mask.txt"}, "[MASK] is missing"),
    ({"vocab_file": "{tmp}/[bl]*.txt"}, "`vocab_file` must be one file"),
    ({"input_file": "{tmp}/caf*.txt"}, "`input_file` must match names in UTF-8."),
    ({"input_file": f"{{tmp}}/{ODD}.txt"}, "`input_file` must be UTF-8"),
    ({"output_dir": f"{{tmp}}/{ODD}"}, "`output_dir` must be UTF-8"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(text, tmp_path, changes, message):
    for name, content in {
        "blank": "\n \n",
        "lone": "doc0",
        "spaces": "\u200b",
        "one": "doc0 doc1\ndoc2",
        "no_mask": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n",
        ODD: "doc0 doc1",
    }.items():
        (tmp_path / f"{name}.txt").write_text(content)
    changes = {name: str(value).format(tmp=tmp_path) for name, value in changes.items()}
    assert_refused(main, CreateConfig, message, **{**flags_of(text, tmp_path / "out"), **changes})
    assert not (tmp_path / "out").exists() and not (tmp_path / ODD).exists()


def test_command_prints_a_table_and_writes_it(text, tmp_path):
    seen = run(main, CreateConfig, **flags_of(text, tmp_path / "out", json=tmp_path / "table.json"))
    assert seen.status == 0 and "mean length" in seen.out
    (row,) = json.loads((tmp_path / "table.json").read_text())
    assert row["split"] == "train" and row["documents"] == NUM_DOCUMENTS
    lengths = read_split(tmp_path / "out", "train")[schema.INPUT_MASK].sum(axis=1)
    assert row["tokens"] == lengths.sum()
    assert row["mean length"] == pytest.approx(lengths.mean())
    assert row["padding"] == pytest.approx(1 - lengths.mean() / 32)


def test_help_and_interrupt(tmp_path):
    program = [sys.executable, str(Path(create_job.__file__).parents[1] / "create_pretraining_data.py")]
    output = subprocess.run([*program, "--help"], capture_output=True, text=True, check=True).stdout
    assert "--do_whole_word_mask (default: false)" in output
    # parsing the sample corpus takes seconds, which is time to interrupt
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


def test_processes_are_started_where_they_pay(text, tmp_path):
    recorded = [(create_job, "choose_num_workers"), (create_job, "Job")]
    flags = {**flags_of(text, tmp_path / "out"), "num_workers": 0}
    calls = run(main, CreateConfig, recorded, **flags).calls
    size = text[0].stat().st_size
    assert calls["choose_num_workers"] == [{"num_workers": 0, "num_bytes": size, "bytes_that_pay": 2**24}]
    assert [call["num_workers"] for call in calls["Job"]] == [1]
