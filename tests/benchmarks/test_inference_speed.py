"""Inference: texts per second, operations of each way, texts, and vectors that agree."""

import contextlib
import gzip
import types

import numpy as np
import pytest
from benchmark_command import tables_of
from encoder_files import TEXTS, write_encoder
from reference import import_reference
from tiny import CONFIG

from benchmarks import inference_speed
from benchmarks.inference_speed import InferenceConfig, padded_batches, peer_shapes, speed_rows
from benchmarks.peers.process import torch_processes
from bert_packed.checkpoints import starting_weights
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from bert_packed.runs.checkpoint_export import export_checkpoint
from bert_packed.runs.export_config import ExportConfig
from data_gen.text import corpus


def test_speeds_are_of_texts_and_ratios_of_neighbours():
    seconds = {"packed": [2.0, 1.0, 4.0], "padded": [6.0, 4.0, 8.0]}
    packed, padded = speed_rows(seconds, {"packed": 6e9, "padded": 12e9}, num_texts=3, factor=2.0)
    assert [packed[name] for name in ("texts/s", "GFLOP a text", "GFLOP/s")] == [1.5, 2.0, 3.0]
    assert (packed["packed is faster by"], packed["of the packing factor"]) == (1.0, 0.5)
    columns = "texts/s", "packed is faster by", "of the packing factor"
    assert [padded[name] for name in columns] == [0.5, 3.0, 1.5]


def test_operations_are_of_every_token_and_pair_of_a_row(monkeypatch):
    """Written out: four products of width by width, two of width by inner width, and two of attention."""
    monkeypatch.setattr(starting_weights, "read_config", lambda folder: CONFIG)
    width, inner, blocks = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_hidden_layers

    def of_batch(rows, length):
        dense = 2 * length * (4 * width * width + 2 * width * inner)
        return rows * blocks * (dense + 2 * 2 * length * length * width)

    found = inference_speed.forward_flops("folder", [(2, 24), (1, 6)])
    assert found == pytest.approx(of_batch(2, 24) + of_batch(1, 6))


def test_batches_have_shapes(monkeypatch):
    assert padded_batches([3, 7, 2], 2) == [(2, 7), (1, 2)]
    assert padded_batches([3, 7, 2], 2, 16) == [(2, 16), (1, 16)]
    monkeypatch.setattr(inference_speed, "REFERENCE_ROWS", 2)
    config = types.SimpleNamespace(max_seq_length=24)
    shapes = peer_shapes(config, [6, 4, 20], ["aa", "a", "aaa"], [*"abcdef"])
    assert shapes["a"] == shapes["d"] == [(2, 24), (1, 24)]
    assert shapes["b"] == [(2, 6), (1, 20)] and shapes["f"] == [(2, 20), (1, 4)]
    encoder = types.SimpleNamespace(batch_size=2, count_packs=lambda texts: 3)
    ours = inference_speed.our_shapes(config, encoder, ["a"] * 5)
    assert ours == {"packed": [(2, 24)] * 2, "padded": [(2, 24)] * 3}


@pytest.fixture
def flags(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write_encoder(folder)
    (tmp_path / "texts").write_text("\n".join(text for text in TEXTS if text) + "\n")
    given = {"init_checkpoint": folder, "vocab_file": folder / "vocab.txt", "text_file": tmp_path / "texts"}
    return given | {"max_seq_length": 24, "batch_size": 2, "repeats": 1}


def test_the_command(tmp_path, flags):
    packed, padded = tables_of("inference_speed", tmp_path, **flags)["texts"]
    assert (packed["way"], padded["way"]) == ("packed", "padded")
    assert padded["GFLOP a text"] > packed["GFLOP a text"]
    assert padded["of the packing factor"] == pytest.approx(padded["packed is faster by"] / (8 / 3))


def test_the_command_with_transformers(tmp_path, flags):
    """Nothing replaced; the vectors of transformers agree."""
    import_reference()
    argv = ["export", f"--init_checkpoint={flags['init_checkpoint']}", f"--output_dir={tmp_path / 'hf'}"]
    argv.append(f"--vocab_file={flags['vocab_file']}")
    assert run(export_checkpoint, ExportConfig, argv) == 0
    flags |= {"init_checkpoint": tmp_path / "hf", "reference": "true"}
    rows = tables_of("inference_speed", tmp_path, **flags)["texts"]
    hows = "padded to 24", "padded to the longest", "sorted by length"
    theirs = [f"{way}, {how}" for way in torch_processes() for how in hows]
    assert [row["way"] for row in rows] == ["packed", "padded", *theirs] and len(rows) >= 5


@pytest.mark.parametrize(("value", "differs"), [(1.00009, False), (1.001, True), (np.nan, True)])
def test_other_vectors_are_noticed(value, differs):
    same, theirs = np.ones((2, 3)), np.array([[1.0, 1, 1], [1, 1, value]])
    ways = {"packed": lambda: same, "same": lambda: same, "theirs": lambda: theirs}
    noticed = pytest.raises(InputError, match=r"must give our vectors.*theirs")
    with noticed if differs else contextlib.nullcontext():
        inference_speed.check_agreement(ways)


def read_texts(path, num_texts=2):
    config = InferenceConfig(init_checkpoint="m", vocab_file="v", text_file=str(path), num_texts=num_texts)
    return inference_speed.read_texts(config)


def test_texts_are_the_first_lines_or_the_first_documents_of_the_sample(tmp_path, monkeypatch):
    content = "\r\n".join(["\ufeffcaf\u00e9", "", " two ", "three"]).encode()
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    assert read_texts(tmp_path / "a.txt") == read_texts(tmp_path / "a.gz") == ["caf\u00e9", "two"]
    assert read_texts(tmp_path / "a.txt", 9) == ["caf\u00e9", "two", "three"]
    (tmp_path / "a.txt").write_bytes(b"\n \n")
    with pytest.raises(InputError, match=r"`text_file` must hold a text\. Received: none in .*a\.txt"):
        read_texts(tmp_path / "a.txt")
    documents = [["One.", "Two."], ["Three."], ["Four."]]
    monkeypatch.setattr(corpus, "read_sample_documents", lambda: iter(documents))
    assert read_texts("", 2) == ["One. Two.", "Three."]
    assert read_texts("", 9) == ["One. Two.", "Three.", "Four."]
