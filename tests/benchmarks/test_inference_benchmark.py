"""The benchmark of inference: its arithmetic by a clock that is told the time, flags, texts, reference."""

import gzip
import json
import types

import numpy as np
import pytest
from clock import Clock
from encoder_files import TEXTS, write_encoder
from reference import import_reference
from tiny import CONFIG

from benchmarks import encoding_work, inference_benchmark, peer_process, torch_reference
from bert_packed import export
from bert_packed.checkpoints import starting_weights
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from bert_packed.evaluation import inference
from bert_packed.runs import interleaved_timing
from data_gen.text import sample_corpus

# After the name of the process
PADDINGS = "padded to 24", "padded to the longest", "sorted by length"
ENCODER = types.SimpleNamespace(batch_size=2)
# Rows and tokens a row of each way's batches, of two rows: three texts of 6, 4 and 20 tokens, in two packs
SHAPES = (
    [(2, 24)],
    [(2, 24), (2, 24)],
    *(THEIRS := ([(2, 24), (1, 24)], [(2, 6), (1, 20)], [(2, 20), (1, 4)])),
    *THEIRS,
)


def flops(shapes):
    """Forward products of batches."""
    return sum(flops_of_batch(*shape) for shape in shapes)


def flops_of_batch(rows, length):
    """Written out: four products of width by width, two of width by inner width, and two of attention."""
    width, inner, blocks = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_hidden_layers
    dense = 2 * length * (4 * width * width + 2 * width * inner)
    return rows * blocks * (dense + 2 * 2 * length * length * width)


def command(**flags):
    module = inference_benchmark
    argv = ["inference_benchmark", *(f"--{name}={value}" for name, value in flags.items())]
    return run(module.main, module.BenchmarkConfig, module.DESCRIPTION, argv)


def test_times_become_texts_per_second(monkeypatch, tmp_path, capsys):
    clock, loaded, encoded = Clock(), [], []
    # the first two calls compare vectors, and compile
    times = {"max": clock.taking([90, 90, 2, 1, 4]), 1: clock.taking([90, 90, 6, 4, 8])}
    times["max_length"], times["longest"] = clock.taking([90, 90, 12, 8, 16]), clock.taking([90, 90, 5, 3, 4])
    times["longest", "sorted"] = clock.taking([90, 90, 3, 2, 4])
    kept = {"max_length": [10, 8, 12], "longest": [4, 3, 4], ("longest", "sorted"): [2, 2, 4]}
    times |= {("kept", way): clock.taking([90, 90, *seconds]) for way, seconds in kept.items()}

    def encode(encoder, texts, max_sequences_per_pack="max"):
        encoded.append((encoder, texts, max_sequences_per_pack))
        times[max_sequences_per_pack]()
        return np.ones((3, 2))

    running = []

    class Peer:
        def __init__(self, make, *arguments, keeps_memory):
            assert make is torch_reference.TorchEncoder and arguments == (str(tmp_path), 24, 2)
            self.keeps_memory = keeps_memory

        def __enter__(self):
            running.append(self)
            return self

        def __exit__(self, *_):
            running.remove(self)

        def call(self, method, texts, padding, sorts=False):
            assert method == "encode" and self in running
            way = (padding, "sorted") if sorts else padding
            return encode(None, texts, ("kept", way) if self.keeps_memory else way)

    monkeypatch.setattr(interleaved_timing, "time", clock)
    monkeypatch.setattr(inference, "load_encoder", lambda *of, **more: loaded.append((of, more)) or ENCODER)
    monkeypatch.setattr(inference, "encode", encode)
    monkeypatch.setattr(inference, "count_packs", lambda encoder, texts: 2)
    monkeypatch.setattr(inference, "count_tokens", lambda encoder, texts: [6, 4, 20])
    monkeypatch.setattr(starting_weights, "read_config", lambda folder: CONFIG)
    monkeypatch.setattr(inference, "packing_factor", lambda encoder, texts: 2.0 * len(texts) / 3)
    monkeypatch.setattr(inference_benchmark, "PeerProcess", Peer)
    monkeypatch.setattr(peer_process, "is_ours_to_set", lambda: True)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "texts").write_text("one\ntwo\nthree\nfour\n")
    flags = {"init_checkpoint": tmp_path, "vocab_file": "vocab", "text_file": tmp_path / "texts"}
    flags |= {"num_texts": 3, "max_seq_length": 24, "batch_size": 2, "num_batches_at_once": 3, "repeats": 3}
    flags |= {"reference": "true", "reference_batch_size": 2}
    assert command(**flags, json=tmp_path / "table.json") == 0

    table = json.loads((tmp_path / "table.json").read_text())
    assert [row.pop("GFLOP a text") for row in table] == [flops(shapes) / 3e9 for shapes in SHAPES]
    assert [row.pop("GFLOP/s") for row in table] == [
        pytest.approx(flops(shapes) / seconds / 1e9)
        for shapes, seconds in zip(SHAPES, (2, 6, 12, 4, 3, 10, 4, 2), strict=True)
    ]
    rows = {row.pop("way"): list(row.values()) for row in table}
    # 3 texts in 2, 6, 12 and 4 seconds; medians of ratios of neighbouring times; of a packing factor of 2
    assert rows == {
        "packed": [1.5, 1, 0.5],
        "padded": [0.5, 3, 1.5],
        "transformers, padded to 24": [0.25, 6, 3],
        "transformers, padded to the longest": [0.75, 2.5, 1.25],
        "transformers, sorted by length": [1.0, 1.5, 0.75],
        "transformers, memory kept, padded to 24": [0.3, 5, 2.5],
        "transformers, memory kept, padded to the longest": [0.75, 2, 1],
        "transformers, memory kept, sorted by length": [1.5, 1, 0.5],
    }
    assert not running
    assert "3 texts, packing factor 2.000" in capsys.readouterr().out
    sizes = {"max_seq_length": 24, "batch_size": 2, "num_batches_at_once": 3}
    assert loaded == [((str(tmp_path), "vocab"), sizes)]
    assert all(texts == ["one", "two", "three"] for _, texts, _ in encoded)
    ours = {"max", 1}
    assert all(encoder is (ENCODER if way in ours else None) for encoder, _, way in encoded)


def test_a_measurement_with_the_reference(tmp_path, capsys):
    """Nothing replaced; the vectors of transformers agree."""
    import_reference()
    model_folder = tmp_path / "model"
    model_folder.mkdir()
    write_encoder(model_folder)
    text_file, hugging_face = tmp_path / "texts.txt", tmp_path / "hf"
    text_file.write_text("\n".join(text for text in TEXTS if text) + "\n")
    argv = ["export", f"--init_checkpoint={model_folder}", f"--output_dir={hugging_face}"]
    argv.append(f"--vocab_file={model_folder / 'vocab.txt'}")
    assert run(export.main, export.ExportConfig, export.DESCRIPTION, argv) == 0
    flags = {"init_checkpoint": hugging_face, "vocab_file": model_folder / "vocab.txt"}
    flags |= {"text_file": text_file, "max_seq_length": 24, "batch_size": 2, "repeats": 1}
    assert command(**flags, json=tmp_path / "table.json", reference="true") == 0
    rows = json.loads((tmp_path / "table.json").read_text())
    theirs = [f"{way}, {how}" for way in peer_process.torch_peers() for how in PADDINGS]
    assert [row["way"] for row in rows] == ["packed", "padded", *theirs] and len(rows) >= 5
    for row in rows:
        assert row["of the packing factor"] == pytest.approx(row["packed / this"] / (8 / 3))
    assert "8 texts, packing factor 2.667" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "differs"), [(1.00009, False), (1.001, True), (np.nan, True)])
def test_other_vectors_are_noticed(value, differs):
    ways = {
        "packed": lambda: np.ones((2, 3)),
        "same": lambda: np.ones((2, 3)),
        "theirs": lambda: np.array([[1.0, 1, 1], [1, 1, value]]),
    }
    if not differs:
        inference_benchmark._check_agreement(ways)
        return
    with pytest.raises(InputError, match=r"must give our vectors.*theirs"):
        inference_benchmark._check_agreement(ways)


def read_texts(path, num_texts=2):
    return inference_benchmark._read_texts(
        inference_benchmark.BenchmarkConfig("model", "vocab.txt", text_file=str(path), num_texts=num_texts)
    )


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_texts_are_the_first_lines(tmp_path, end):
    content = end.join(["\ufeffcaf\u00e9", "", " two ", "three"]).encode()
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    assert read_texts(tmp_path / "a.txt") == read_texts(tmp_path / "a.gz") == ["caf\u00e9", "two"]
    assert read_texts(tmp_path / "a.txt", 9) == ["caf\u00e9", "two", "three"]


def test_without_a_file_texts_are_the_first_documents_of_the_sample(monkeypatch):
    documents = [["One.", "Two."], ["Three."], ["Four."]]
    monkeypatch.setattr(sample_corpus, "read_sample_documents", lambda: iter(documents))
    for num_texts, texts in ((2, ["One. Two.", "Three."]), (9, ["One. Two.", "Three.", "Four."])):
        config = inference_benchmark.BenchmarkConfig("model", "vocab.txt", num_texts=num_texts)
        assert inference_benchmark._read_texts(config) == texts


def test_other_encodings_and_empty_files_are_one_line(tmp_path):
    (tmp_path / "a.txt").write_bytes("fine\ncaf\u00e9\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"a\.txt, line 2: text must be UTF-8"):
        read_texts(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"\n \n")
    with pytest.raises(InputError, match=r"`text_file` must hold a text\. Received: none in .*a\.txt"):
        read_texts(tmp_path / "a.txt")


def test_batches_have_shapes():
    assert encoding_work.full_batches(5, 2, 16) == [(2, 16)] * 3
    assert encoding_work.padded_batches([3, 7, 2], 2) == [(2, 7), (1, 2)]
    assert encoding_work.padded_batches([3, 7, 2], 2, 16) == [(2, 16), (1, 16)]
    assert list(torch_reference.longest_first(["a", "bcd", "ef", "g"])) == [1, 2, 0, 3]
