"""Each benchmark runs as its user runs it, at the smallest sizes, and writes its tables: the wiring alone.

Elsewhere run the accelerator's tables (`test_accelerator.py`) and steps
(`tests/training/test_without_tensorflow.py`), layouts (`test_parallelism_programs.py`), and a step for a TPU
(`test_roofline.py`).
"""

import dataclasses
import json
from pathlib import Path

import pytest
from benchmark_command import is_png, run_benchmark, tables_of, write_config
from encoder_files import TEXTS, WORDS, write_encoder
from next_tokens import CONFIG as MAMBA
from next_tokens import MAMBA2
from reference import import_reference

from benchmarks import packing_speed, packing_tables
from benchmarks.packing_figures import GLUE, PRINTED
from benchmarks.synthetic_data import write_sequences
from bert_packed.architectures.registry import config_json
from bert_packed.core.command_line import run
from bert_packed.core.storage import write_json
from bert_packed.packing.nnlshp import mix_nnlshp
from bert_packed.runs.checkpoint_export import ExportConfig, export_checkpoint

SMALL = {"num_hidden_layers": 1, "max_position_embeddings": 32}


def training_speed(folder, monkeypatch):
    lengths = folder / "lengths.json"
    lengths.write_text(json.dumps({"lengths": [4, 9, 16], "counts": [600, 300, 100]}))
    flags = {"histogram": lengths, "bert_config_file": write_config(folder / "config.json", **SMALL)}
    return flags | {"max_seq_length": 16, "batch_size": 2, "repeats": 1}


def inference_speed(folder, monkeypatch):
    (folder / "model").mkdir()
    write_encoder(folder / "model")
    (folder / "texts").write_text("\n".join(text for text in TEXTS if text) + "\n")
    flags = {"init_checkpoint": folder / "model", "vocab_file": folder / "model/vocab.txt"}
    return flags | {"text_file": folder / "texts", "max_seq_length": 24, "batch_size": 2, "repeats": 1}


def embedding(folder, monkeypatch):
    (folder / "model").mkdir()
    write_encoder(folder / "model")
    pairs = [{"anchor": WORDS[i], "positive": " ".join(WORDS[i + 1 : 9])} for i in range(6)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    flags = {"init_checkpoint": folder / "model", "train_file": folder / "pairs.jsonl", "repeats": 1}
    return flags | {"max_seq_length": 16, "train_batch_size": 3, "micro_batch_size": 1}


def classification(folder, monkeypatch):
    flags = embedding(folder, monkeypatch)
    rows = [f"{' '.join(WORDS[i : 2 * i + 1])},{'ab'[i % 2]}" for i in range(9)]
    (folder / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    del flags["micro_batch_size"]
    return flags | {"train_file": folder / "rows.csv", "steps": 2}


def classification_by_others(folder, monkeypatch):
    import_reference()
    return classification(folder, monkeypatch) | {"reference": "true"}


def exported(folder):
    """Flags of the model in transformers' form, and of peers."""
    import_reference()
    argv = ["export", f"--init_checkpoint={folder}/model", f"--vocab_file={folder}/model/vocab.txt"]
    assert run(export_checkpoint, ExportConfig, [*argv, f"--output_dir={folder}/hf"]) == 0
    return {"init_checkpoint": folder / "hf", "reference": "true"}


def embedding_by_others(folder, monkeypatch):
    return embedding(folder, monkeypatch) | exported(folder)


def inference_by_others(folder, monkeypatch):
    return inference_speed(folder, monkeypatch) | exported(folder)


def trainer(folder, monkeypatch):
    pytest.importorskip("datasets", reason="pip install -e '.[torch]'")
    import transformers_models as models  # torch: only now

    models.build("bert").save_pretrained(folder / "model")
    models.make_tokenizer().save_pretrained(folder / "model")
    (folder / "rows.csv").write_text("text,label\nword1 word2,a\nword3,b\n")
    files = dict.fromkeys(("train_file", "eval_file"), folder / "rows.csv")
    return {**files, "init_checkpoint": folder / "model", "max_seq_length": 24, "batch_size": 2, "repeats": 1}


def audited_models(folder, monkeypatch):
    import_reference()
    return {"models": "funnel,longformer,roberta,rwkv"}


def mamba_config(folder, name="mamba.json", config=MAMBA):
    write_json(folder / name, config_json(dataclasses.replace(config, num_hidden_layers=1)))
    return folder / name


def packmamba(folder, monkeypatch):
    flags = {"bert_config_file": mamba_config(folder), "picture": folder / "picture.png", "shrink": 8}
    flags["against"] = mamba_config(folder, "mamba2.json", MAMBA2)
    return flags | {"max_seq_length": 64, "pack_length": 64, "batch_size": 2, "repeats": 1}


def step_memory(folder, monkeypatch):
    config = write_config(folder / "config.json", **SMALL)
    return {"bert_config_file": config, "batch_size": 4, "micro_batch_size": 2, "lengths": "16,32"}


def data_throughput(folder, monkeypatch):
    paths = write_sequences(folder / "in", 60, 32, num_files=2)
    return {"input_file": ",".join(paths), "max_seq_length": 32, "repeats": 1}


def tables_of_packing(folder, monkeypatch):
    monkeypatch.setattr(packing_tables, "EXTRA", [])
    monkeypatch.setattr(packing_tables, "PRINTED", [row for row in PRINTED if row.table == GLUE])
    # Thirteen depths of Wikipedia take half a minute
    monkeypatch.setattr(packing_tables.draw, "__defaults__", ((1, "max"), ("spfhp",)))
    return {"picture": folder / "picture.png"}


def speed_of_packing(folder, monkeypatch):
    # The dense matrix takes half a minute
    monkeypatch.setattr(packing_speed, "mix_by_dense_nnls", lambda *given: mix_nnlshp(*given)[0])
    monkeypatch.setattr(packing_speed, "NUM_ONLINE", 20_000)
    return {"repeats": 1}


slow = pytest.mark.slow
# A case has the benchmark, its flags at the smallest sizes, and its tables
CASES = [
    ("training_speed", training_speed, ["data", "steps", "speed-ups"]),
    ("inference_speed", inference_speed, ["texts"]),
    pytest.param("inference_speed", inference_by_others, ["texts"], marks=slow),
    ("classification", classification, ["steps"]),
    pytest.param("classification", classification_by_others, ["steps"], marks=slow),
    ("embedding", embedding, ["steps", "encode"]),
    pytest.param("embedding", embedding_by_others, ["steps", "encode"], marks=slow),
    ("trainer", trainer, ["epochs"]),
    ("audited_models", audited_models, ["models"]),
    pytest.param(
        "packmamba", packmamba, ["padding", "training", "packed against others", "restarts"], marks=slow
    ),
    pytest.param("step_memory", step_memory, ["memory"], marks=[slow, pytest.mark.both_backends]),
    ("data_throughput", data_throughput, ["pack from file to file"]),
    ("packing_tables", tables_of_packing, None),
    pytest.param("packing_speed", speed_of_packing, ["packing"], marks=slow),
]


@pytest.mark.parametrize(("name", "flags_of", "tables"), CASES)
def test_a_benchmark_runs_at_the_smallest_sizes(name, flags_of, tables, tmp_path, monkeypatch, request):
    if name != "step_memory":  # reads the compiled program
        request.getfixturevalue("uncompiled")
    flags = flags_of(tmp_path, monkeypatch)
    statuses = (0, 1) if name == "packing_speed" else (0,)  # a busy machine may miss what is wanted
    found = tables_of(name, tmp_path, statuses, **flags)
    assert tables is None or [one for one in found if one != "XLA's count"] == tables
    for rows in found.values():
        assert all(set(row) == set(rows[0]) for row in rows)
        assert all(
            value > 0
            for row in rows
            for key, value in row.items()
            if key.endswith("/s") and value is not None
        )
    assert "picture" not in flags or is_png(Path(flags["picture"]))


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        (
            "training_speed",
            {"histogram": "a", "input_file": "b"},
            "`histogram` must be left out with input_file=b",
        ),
        ("packmamba", {"pack_length": 1024}, "`pack_length` must be at least max_seq_length=2048"),
        (
            "packmamba",
            {"reference": "true", "parts": "padding"},
            "`reference` must be left out",
        ),
        ("packmamba", {"bert_config_file": "bert-tiny"}, "`bert_config_file` must be a Mamba or Mamba-2"),
        ("accelerator", {"models": "bert-mimi"}, "must be different ones of bert-tiny, bert-mini, "),
        ("parallelism", {"devices": "4,8"}, "must be squares of 2, 4, 8, ..., separated by commas"),
        ("step_memory", {"lengths": "8"}, "`lengths` must be numbers from 16, separated by commas"),
        ("soak", {"command": "false", "output_dir": "/proc"}, "`output_dir` must be new. Received: /proc."),
        (
            "device_session",
            {"text": "t", "labels": "l", "pairs": "p", "output_dir": "/proc"},
            "`output_dir` must be new. Received: /proc.",
        ),
        ("data_throughput", {"input_file": "/none"}, "`input_file` must match at least one file"),
    ],
)
def test_a_mistake_is_one_line(name, flags, message, capsys):
    assert run_benchmark(name, **flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
