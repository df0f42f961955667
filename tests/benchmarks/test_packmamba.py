"""The report on Mambas as a command: flags, lengths, tables in print, JSON and picture."""

import json

import numpy as np
import pytest
from mamba_batches import WAYS
from next_tokens import CONFIG

from benchmarks import mamba_operators, mamba_speed, packmamba, packmamba_parts, reset_cost
from benchmarks.padding_rates import draw_lengths, padding_rates
from benchmarks.sequence_batches import PACKED, PADDED, SINGLE
from bert_packed.config import config_json
from bert_packed.core.command_line import run


def command(*flags):
    module = packmamba
    return run(module.main, module.PackMambaConfig, module.DESCRIPTION, ["packmamba", *flags])


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_json(CONFIG)))
    return path


def test_flags_arrive_and_tables_are_written(monkeypatch, tmp_path, config_file, capsys):
    asked = {}

    def told(name, result):
        return lambda *of: asked.setdefault(name, of) and result

    speed = {"way": SINGLE, "s": 1.0, "real tokens/s": 10.0, "gain": 1.0}
    operator = {"operator": "scan", "pass": "forward", **speed}
    monkeypatch.setattr(
        mamba_speed, "measure_training", told("training", ([speed], [{"packed against": SINGLE}]))
    )
    told_of_reference = told("reference", ({"path": "slow"}, {"packed against": "transformers"}))
    monkeypatch.setattr(mamba_speed, "measure_reference", told_of_reference)
    monkeypatch.setattr(mamba_operators, "measure_operators", told("operators", [operator]))
    monkeypatch.setattr(reset_cost, "measure_resets", told("resets", [{"of": "step"}]))
    monkeypatch.setattr(mamba_operators, "measure_variants", told("variants", [{"scan": "one"}]))
    monkeypatch.setattr(mamba_speed, "step_memory", told("memory", [{"tokens": 64}]))
    table, picture = tmp_path / "tables.json", tmp_path / "picture.png"
    flags = {"bert_config_file": config_file, "parts": ",".join(packmamba.PARTS), "max_seq_length": 128}
    flags |= {"pack_length": 256, "batch_size": 2, "num_steps": 2, "num_shapes": 3, "window": 1, "repeats": 8}
    flags |= {"shrink": 2, "reset_repeats": 9, "reference_rows": 3, "reference_repeats": 4}
    flags |= {"memory_lengths": "64,128", "random_seed": 5, "json": table, "picture": picture}
    assert command(*(f"--{name}={value}" for name, value in flags.items()), "--reference") == 0
    config, batches, repeats = asked["training"]
    assert (config, repeats) == (CONFIG, 8) and asked["reference"] == (CONFIG, batches, 3, 4)
    packs = batches[PACKED].batches
    assert asked["operators"] == (CONFIG, batches, 8) and asked["memory"] == (CONFIG, [64, 128])
    assert asked["resets"] == (CONFIG, packs, 9) and asked["variants"] == (CONFIG, packs, 8)
    assert [batch["token_ids"].shape for batch in packs] == [(2, 128)] * 2
    assert batches[PADDED].batches[0]["token_ids"].shape == (4, 64)
    assert len({batch["token_ids"].shape for batch in batches[SINGLE].batches}) == 3
    lengths = np.maximum(1, draw_lengths(packmamba_parts.ALL_LENGTHS, 5) * 128 // 2048)
    tables = json.loads(table.read_text())
    assert tables["padding"] == padding_rates(lengths, 128, 256, window=1, seed=5)
    # a window of one sequence is the order of arrival
    assert tables["padding"][1]["rows"] == tables["padding"][2]["rows"]
    ways = [row["packed against"] for row in tables["packed against others"]]
    assert ways == [SINGLE, "transformers"] and tables["reference"] == [{"path": "slow"}]
    assert {"cpu", "backend", *packmamba.PARTS} < tables.keys()
    assert list(tables["seconds"]) == list(packmamba.PARTS)
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "histogram-packed (cghp)" in out and "rows of 64 tokens, steps of 2 packs of 128" in out
    assert all(f"\n{part} took " in out for part in packmamba.PARTS)


def test_transformers_takes_turns_only_where_it_is_asked(monkeypatch, config_file):
    monkeypatch.setattr(mamba_speed, "measure_training", lambda *of: ([], []))
    monkeypatch.setattr(mamba_speed, "measure_reference", None)
    assert command(f"--bert_config_file={config_file}", "--parts=training", "--max_seq_length=128") == 0


def test_lengths_of_records(tmp_path, config_file, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("a few words of text. " * number for number in range(1, 30)))
    from data_gen.text.create_config import CreateConfig
    from data_gen.text.create_job import create

    create(
        CreateConfig(
            input_file=str(text),
            output_dir=str(tmp_path / "records"),
            objective="causal_lm",
            max_seq_length=64,
            vocab_size=300,
            num_workers=1,
        )
    )
    records = f"--input_file={tmp_path}/records/train-*.tfrecord"
    flags = [f"--bert_config_file={config_file}", "--parts=padding", "--pack_length=128", records]
    assert command(*flags, "--max_seq_length=64", f"--json={tmp_path}/t.json") == 0
    manifest = json.loads((tmp_path / "records" / "manifest.json").read_text())
    rows = json.loads((tmp_path / "t.json").read_text())["padding"]
    assert rows[0]["rows"] == manifest["splits"]["train"]["num_sequences"] and rows[0]["tokens"] == 64
    assert (
        command(*flags[:3], f"{records}", "--max_seq_length=64", "--parts=training", "--batch_size=999") == 2
    )
    assert "must hold enough to fill 999 packs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, rule",
    [
        (["--parts=padding,speed"], "parts=padding,speed: must be of padding, training, operators, resets"),
        (["--pack_length=1024"], "`pack_length` must be at least max_seq_length=2048"),
        (["--shrink=257"], "`shrink` must leave 8 of max_seq_length=2048 tokens"),
        (["--pack_length=2104", "--parts=variants"], "`pack_length` over shrink must be a multiple of 32"),
        (["--memory_lengths=64,0"], "`memory_lengths` must be whole numbers from 1"),
        (["--reference", "--parts=padding"], "`reference` needs training among `parts`"),
        (["--bert_config_file=bert-tiny"], "`bert_config_file` must be a Mamba"),
    ],
)
def test_mistakes(flags, rule, capsys):
    assert command(*flags) == 2
    assert rule in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.both_backends
def test_a_measurement(tmp_path, config_file, capsys):
    """Nothing replaced: engines, programs and clock."""
    table = tmp_path / "tables.json"
    flags = [
        f"--bert_config_file={config_file}",
        f"--json={table}",
        "--max_seq_length=64",
        "--pack_length=64",
    ]
    assert (
        command(
            *flags,
            "--batch_size=2",
            "--num_shapes=1",
            "--repeats=1",
            "--reset_repeats=1",
            "--shrink=1",
            "--parts=training,operators,resets,variants",
        )
        == 0
    )
    tables = json.loads(table.read_text())
    assert [row["way"] for row in tables["training"]] == list(WAYS)
    assert [row["packed against"] for row in tables["packed against others"]] == [SINGLE, PADDED]
    assert len(tables["operators"]) == 12 and len(tables["resets"]) == 3
    assert all(row["times as long"] > 0 for row in tables["variants"])
