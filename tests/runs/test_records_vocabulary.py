"""Who masks packs anew finds the vocabulary that they were made with, and takes no other one."""

import json
import os

import pytest
from tiny import write_data

from bert_packed.runs.pretraining_config import TrainConfig
from bert_packed.runs.pretraining_data import read_data
from data_gen.cli.settings import InputError
from data_gen.jobs import files
from data_gen.records.provenance import describe_path
from data_gen.text.tokenization import SPECIAL_TOKENS, Vocabulary, save_vocab


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """A folder of packs whose manifest says that they are of `instances/` and a vocabulary."""
    monkeypatch.chdir(tmp_path)
    for name in ("packed", "instances"):
        os.mkdir(name)
    write_data(tmp_path / "packed")
    save_vocab(Vocabulary((*SPECIAL_TOKENS, "a", "##b")), "vocab.txt")
    manifest = {
        "kind": "packed",
        "num_packs": 15,
        "num_sequences": 36,
        "histogram": {"lengths": [3, 6], "counts": [30, 6]},
        "vocab_sha256": files.file_sha256("vocab.txt"),
        "inputs": [describe_path("instances/train-0.tfrecord", "packed")],
        "files": [],
    }
    (tmp_path / "packed" / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path / "packed"


def read(**flags):
    return read_data(
        TrainConfig(input_file="packed/*.tfrecord", output_dir="run", masking="dynamic", **flags)
    )


@pytest.mark.parametrize("folder", ["packed", "instances"])
def test_the_vocabulary_of_the_records_is_found(packed, folder):
    os.rename("vocab.txt", f"{folder}/vocab.txt")
    data = read()
    assert data.masking._vocabulary.tokens == (*SPECIAL_TOKENS, "a", "##b")
    # by which a run that continues with another one is refused
    assert data.facts["masking_vocabulary"] == files.file_sha256(f"{folder}/vocab.txt")


def test_it_may_lie_elsewhere(packed):
    assert len(read(vocab_file="vocab.txt").masking._vocabulary) == 7


def test_none_is_found(packed):
    with pytest.raises(
        InputError, match=r"`vocab_file` must be given .* Received: nothing, and packed, inst"
    ):
        read()


def test_another_one_is_refused(packed):
    save_vocab(Vocabulary((*SPECIAL_TOKENS, "a", "##c")), "other.txt")
    with pytest.raises(
        InputError, match=r"`vocab_file` must be the one .* Received: other\.txt, of [0-9a-f]"
    ):
        read(vocab_file="other.txt")


def test_masks_of_the_records_need_none(packed):
    data = read_data(TrainConfig(input_file="packed/*.tfrecord", output_dir="run"))
    assert data.masking is None and data.facts["masking_vocabulary"] is None
