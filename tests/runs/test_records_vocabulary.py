"""Dynamic masking finds the vocabulary that packs were made with, and takes no other one."""

import json
import os

import pytest
from byte_tokenizers import ours
from tiny import manifest_of, write_data

from bert_packed.architectures.bert.config import ModelConfig
from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records.provenance import describe_path
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.runs.pretraining_data import check_fits, read_data
from bert_packed.runs.vocabulary import keep_copy
from bert_packed.text import byte_bpe
from bert_packed.text.tokenization import SPECIAL_TOKENS, Vocabulary, load_vocab, save_vocab


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """A folder of packs whose manifest says that they are of `instances/` and a vocabulary."""
    monkeypatch.chdir(tmp_path)
    for name in ("packed", "instances"):
        os.mkdir(name)
    write_data(tmp_path / "packed")
    save_vocab(Vocabulary((*SPECIAL_TOKENS, "a", "##b")), "vocab.txt")
    inputs = [describe_path("instances/train-0.tfrecord", "packed")]
    manifest = manifest_of(vocab_sha256=storage.file_sha256("vocab.txt"), inputs=inputs)
    (tmp_path / "packed" / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path / "packed"


def read(**flags):
    return read_data(
        PretrainingConfig(
            **{"input_file": "packed/*.tfrecord", "output_dir": "run", "masking": "dynamic", **flags}
        )
    )


def claim(packed, **claims):
    """Write other claims into the manifest; None leaves one out."""
    manifest = json.loads((packed / "manifest.json").read_text()) | claims
    known = {name: value for name, value in manifest.items() if value is not None}
    (packed / "manifest.json").write_text(json.dumps(known))


@pytest.mark.parametrize("folder", ["packed", "instances"])
def test_the_vocabulary_of_the_records_is_found(packed, folder):
    os.rename("vocab.txt", f"{folder}/vocab.txt")
    data = read()
    assert data.masking._vocabulary.tokens == (*SPECIAL_TOKENS, "a", "##b")
    # A run that continues with another vocabulary is refused by this
    assert data.facts["data"]["masking_vocabulary"] == storage.file_sha256(f"{folder}/vocab.txt")


def test_a_nearer_vocabulary_with_another_checksum_is_ignored(packed):
    save_vocab(Vocabulary((*SPECIAL_TOKENS, "other")), "packed/vocab.txt")
    with pytest.raises(
        InputError, match=r"`vocab_file` must be given .* Received: nothing, and packed, inst"
    ):
        read()
    with pytest.raises(InputError, match=r"`vocab_file` must be the one .* Received: packed/vocab\.txt, of "):
        read(vocab_file="packed/vocab.txt")
    assert len(read(vocab_file="vocab.txt").masking._vocabulary) == 7
    data = read(masking="static")
    assert data.masking is data.vocabulary is data.facts["data"]["masking_vocabulary"] is None
    os.rename("vocab.txt", "instances/vocab.txt")
    assert read().masking.vocab_size == 7


def test_a_vocabulary_that_the_model_cannot_read_is_ignored(packed):
    claim(packed, vocab_sha256=None)
    byte_bpe.save(ours(), packed / "tokenizer.json")
    with pytest.raises(InputError, match=r"`vocab_file` must be given .* where no vocab\.txt is beside"):
        read()
    os.rename("vocab.txt", "instances/vocab.txt")
    assert read().masking.vocab_size == 7
    assert read(bert_config_file="modernbert-tiny").masking.vocab_size == 286


@pytest.mark.parametrize("inputs", [5, ["a"], [{"name": "x"}], [{"path": 3}]])
def test_inputs_of_a_manifest_that_are_none(packed, inputs):
    claim(packed, inputs=inputs)
    with pytest.raises(InputError, match="`vocab_file` must be given"):
        read()


def test_the_model_must_have_a_row_for_what_may_be_drawn(packed):
    data = read(vocab_file="vocab.txt")
    config = ModelConfig(vocab_size=6, hidden_size=4, num_attention_heads=1, intermediate_size=4)
    settings = PretrainingConfig(input_file="x", output_dir="y", bert_config_file="tiny")
    with pytest.raises(
        InputError, match=r"vocabulary of `vocab_file` must be at most vocab_size=6 of tiny\. Received: 7"
    ):
        check_fits(data, config, settings)


def test_without_fresh_masks_it_is_found_by_its_checksum_alone(packed):
    os.rename("vocab.txt", "instances/vocab.txt")
    found = read(masking="static").vocabulary
    assert (found.path, found.size, found.do_lower_case) == ("instances/vocab.txt", 7, None)
    claim(packed, vocab_sha256=None)
    # What lies there may be another's, so only fresh masks, which need one, take it
    assert read(masking="static").vocabulary is None
    assert read().vocabulary == found
    assert read(masking="static", vocab_file="instances/vocab.txt").vocabulary == found


@pytest.mark.parametrize("folder", ["run", "first/checkpoint-4", "first"])
def test_the_vocabulary_of_this_and_the_earlier_run_is_found(packed, folder):
    claim(packed, vocab_sha256=None)
    kept = folder.split("/")[0]
    os.makedirs(f"{kept}/checkpoint-4")
    os.rename("vocab.txt", f"{kept}/vocab.txt")
    with open(f"{kept}/run.json", "w") as file:
        json.dump({"flags": {}}, file)
    start = {} if kept == "run" else {"init_checkpoint": folder}
    assert read(**start).vocabulary.path == f"{kept}/vocab.txt"
    if kept == "run":
        with pytest.raises(InputError, match="`vocab_file` must be given"):
            read(overwrite=True)
        # A run that empties the folder may have its vocabulary there
        found = read(overwrite=True, vocab_file="run/vocab.txt").vocabulary
        os.remove("run/vocab.txt")
        keep_copy(packed.parent / "run", found)
        assert load_vocab("run/vocab.txt").tokens == (*SPECIAL_TOKENS, "a", "##b")
        assert storage.read_json("run/run.json")["vocabulary"] == found.facts


def test_a_tokenizer_of_bytes_is_found_too(packed):
    os.remove("vocab.txt")
    byte_bpe.save(byte_bpe.train([["a b"]], 257), "instances/tokenizer.json")
    claim(packed, vocab_sha256=storage.file_sha256("instances/tokenizer.json"), do_lower_case=True)
    found = read(masking="static").vocabulary
    assert (found.path, found.size, found.do_lower_case) == ("instances/tokenizer.json", 257, None)
    assert found.facts["file"] == "tokenizer.json"
