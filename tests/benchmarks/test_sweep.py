"""Sets of runs: their flags, one after another until one fails; what they come to in tables."""

import dataclasses
from pathlib import Path

import pytest
from benchmark_command import is_png, run_benchmark, tables_of, write_config
from squad_files import QUESTIONS, write
from test_run_curves import write_run

from benchmarks import full_pretraining, learning_curves, sweep
from benchmarks.sweep import Run, packs_of, read_packing_factor, steps_for
from benchmarks.synthetic_data import VOCAB_SIZE, write_sequences
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json, write_json
from bert_packed.text import tokenization
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack

CURVES = learning_curves.CurvesConfig(
    packed_file="p", unpacked_file="u", eval_file="e", output_dir="o", num_sequences=800, sequences_per_step=8
)
INTERVALS = ("log_steps", "eval_steps", "save_checkpoints_steps")
PHASES = {f"phase{n}_{name}": f"{name[0]}{n}" for n in (1, 2) for name in ("packed", "unpacked", "eval")}
FULL = full_pretraining.FullConfig(
    **PHASES, train_file="t", predict_file="d", vocab_file="v", output_dir="o", seeds="1,2"
)


def write_pair(folder, length, **changes):
    """Pack the same sequences at full depth and at depth 1; their patterns by name."""
    paths = write_sequences(folder / "sequences", 60, length, num_files=1, **changes)
    found = {}
    for name, depth in (("packed", "max"), ("unpacked", 1)):
        sizes = {"max_seq_length": length, "max_sequences_per_pack": depth, "num_shards": 1}
        pack(PackConfig(input_file=paths[0], output_dir=str(folder / name), **sizes))
        found[name] = f"{folder / name}/*.tfrecord"
    return found


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Flags of learning curves: records and a model for them."""
    folder = tmp_path_factory.mktemp("curves")
    files = write_pair(folder, 32)
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1, "max_position_embeddings": 32}
    config = write_config(folder / "config.json", hidden_dropout_prob=0.1, **sizes)
    return {
        "packed_file": files["packed"],
        "unpacked_file": files["unpacked"],
        "eval_file": files["unpacked"],
        "bert_config_file": config,
    }


def test_variants_differ_as_the_paper_has_it():
    config = dataclasses.replace(CURVES, sets="same_sequences,same_batch,ablations", seeds="1,2")
    runs = {run.name: run.flags for run in learning_curves.make_runs(config, 2.0)}
    assert len(runs) == 2 * 10 and list(runs)[10] == "unpacked-seed2"
    packed = runs["packed-seed1"]
    changed = {"unpacked": {"input_file": "u", "train_batch_size": 8}}  # than `packed`
    same = {"train_batch_size": 8, "num_train_steps": 50}
    changed["packed_same_batch"] = same
    changed["packed_betas"] = same | {"packing_correction": "betas"}
    changed["packed_learning_rate"] = same | {"learning_rate": 2 * packed["learning_rate"]}
    changed["unpacked_twice"] = {"input_file": "u", "train_batch_size": 16, "num_train_steps": 50}
    changed["unpacked_twice"] |= {"beta_1": 0.9**2, "beta_2": 0.999**2}
    changed["no_attention_mask"] = {"ablation": "no_attention_mask"}
    for variant, changes in changed.items():
        flags = runs[f"{variant}-seed2"]
        length = {name: flags[name] for name in ("num_warmup_steps", *INTERVALS)}
        assert length == dict.fromkeys(INTERVALS, flags["num_train_steps"] // 50) | {
            "num_warmup_steps": flags["num_train_steps"] // 10
        }
        assert flags == {**packed, **length, "random_seed": 2, **changes}, variant
    expected = {"input_file": "p", "eval_input_file": "e", "train_batch_size": 4, "num_train_steps": 100}
    assert expected.items() <= packed.items() and packed["packing_correction"] == "none"


def test_phases_and_fine_tunings_start_from_one_another():
    runs = full_pretraining.make_runs(FULL, {"phase1": 2.0, "phase2": 4.0})
    flags = {run.name: run.flags for run in runs}
    names = ["phase1-{}-seed1", "phase2-{}-seed1", "squad-{}1-seed1", "squad-{}1-seed2"]
    expected = [name.format(kind) for kind in ("packed", "unpacked") for name in names]
    assert list(flags) == [*expected, "squad-random-seed1", "squad-random-seed2"]
    first, second = flags["phase1-packed-seed1"], flags["phase2-packed-seed1"]
    assert first["init_checkpoint"] == "" and first["train_batch_size"] == 32
    assert second["init_checkpoint"] == str(Path("o/phase1-packed-seed1").resolve())
    assert (second["input_file"], second["train_batch_size"]) == ("p2", 8)
    of_phase1 = [flags[f"phase1-{kind}-seed1"]["num_train_steps"] for kind in ("packed", "unpacked")]
    assert of_phase1 == [938, 938]  # 64 of 60,000 sequences in each update, packed or not
    unpacked = flags["phase2-unpacked-seed1"]
    assert (unpacked["input_file"], unpacked["train_batch_size"]) == ("u2", 32)
    tuned, random = flags["squad-packed1-seed2"], flags["squad-random-seed1"]
    assert tuned["init_checkpoint"].endswith("phase2-packed-seed1") and tuned["random_seed"] == 2
    assert (tuned["bert_config_file"], random["init_checkpoint"]) == ("", "")
    assert random["bert_config_file"] == "bert-mini"


def test_updates_on_packs_see_about_as_many_sequences():
    assert packs_of(26, 2.165, "b") == 12 and packs_of(1, 1.02, "b") == 1
    with pytest.raises(InputError, match=r"`b` must let an update on packs see within 5% .*3 packs of 2.9"):
        packs_of(8, 2.9, "b")
    flags = steps_for(1000, 26.0, 10)
    assert (flags["num_train_steps"], flags["num_warmup_steps"], flags["eval_steps"]) == (38, 4, 4)


def test_data_that_are_not_the_same_are_refused(records, tmp_path):
    def read(**changes):
        return read_packing_factor(dataclasses.replace(CURVES, **changes), "packed_file", "unpacked_file")

    files = {name: records[name] for name in ("packed_file", "unpacked_file")}
    manifest = read_json(Path(files["packed_file"]).parent / "manifest.json")
    assert read(**files) == 60 / manifest["num_packs"] > 1.2
    with pytest.raises(InputError, match=r"`unpacked_file` must hold the 60 sequences of packed_file"):
        read(**files | {"unpacked_file": files["packed_file"]})
    others = write_pair(tmp_path / "others", 32, seed=99)
    with pytest.raises(InputError, match=r"Received: 60 in 60 rows, of other lengths"):
        read(**files | {"unpacked_file": others["unpacked"]})
    (tmp_path / "lonely.tfrecord").write_bytes(b"record")
    with pytest.raises(InputError, match=r"`packed_file` must have manifest.json beside it"):
        read(**files | {"packed_file": f"{tmp_path}/lonely.tfrecord"})


def test_runs_are_taken_in_order_until_one_fails(tmp_path, monkeypatch, capsys):
    """A command in the place of a training notes its seed; that of seed 2 ends with a status."""
    (tmp_path / "run_pretraining.py").write_text(
        "import pathlib, sys\n"
        "flags = dict(a[2:].split('=', 1) for a in sys.argv[1:])\n"
        "(pathlib.Path(__file__).parent / 'seen').open('a').write(flags['random_seed'] + ' ')\n"
        "sys.exit(143 if flags['random_seed'] == '2' else 0)\n"
    )
    monkeypatch.setattr(sweep, "TOP", tmp_path)
    monkeypatch.setattr(sweep, "check_runs", lambda *_: None)
    runs = [Run(f"a-seed{seed}", {"random_seed": seed, "input_file": ""}) for seed in (1, 2, 3)]
    config = dataclasses.replace(CURVES, output_dir=str(tmp_path / "all"))
    assert sweep.run_all(runs[::2], config) is None and (tmp_path / "seen").read_text() == "1 3 "
    assert sweep.run_all(runs, config) == 143 and (tmp_path / "seen").read_text() == "1 3 1 2 "
    assert "a-seed2 ended with status 143; the same command continues" in capsys.readouterr().err


def finish(run, folder):
    """Leave what a run leaves that came to its end; 0, as `take`."""
    path, last = Path(folder) / run.name, run.flags.get("num_train_steps", 2)
    if "squad" in run.name:
        write_json(path / "eval_results.json", {"exact_match": 12.5, "f1": 25.0 + run.flags["random_seed"]})
    else:
        rows = [(last // 2, 8.0, 0.1, 5), (last, 7.0, 0.2, 5)]
        write_run(path, rows, rows, last, run.flags["train_batch_size"], 1.0)
    return 0


def test_learning_curves_in_tables_and_pictures(records, monkeypatch, tmp_path, capsys):
    """Nothing is trained: logs are written as runs leave them."""
    taken = []
    monkeypatch.setattr(sweep, "take", lambda run, to: taken.append(run.more_flags) or finish(run, to))
    flags = {**records, "output_dir": tmp_path / "all", "seeds": "1,2", "run_flags": "--dtype=float32"}
    flags |= {"num_sequences": 80, "sequences_per_step": 10}
    assert run_benchmark("learning_curves", print_commands="true", **flags) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 and all("run_pretraining.py" in line for line in printed) and not taken
    rows = tables_of("learning_curves", tmp_path, **flags)["runs"]
    assert taken == ["--dtype=float32"] * 4
    assert [(row["variant"], row["complete"]) for row in rows] == [("unpacked", 2), ("packed", 2)]
    assert is_png(tmp_path / "all" / "same_sequences.png")


def test_full_pretraining_in_a_table(records, monkeypatch, tmp_path, capsys):
    """Nothing is trained; a mistake in flags is seen before the first run."""
    monkeypatch.setattr(sweep, "take", finish)
    words = tokenization.train_vocab([["a b c who wrote the first program"]], 60, do_lower_case=True).tokens
    rest = [f"[unused{number}]" for number in range(VOCAB_SIZE - len(words))]
    (tmp_path / "vocab.txt").write_text("\n".join([*words, *rest]) + "\n")
    flags = {name: records[f"{name.partition('_')[2]}_file"] for name in PHASES}
    flags |= dict.fromkeys(("train_file", "predict_file"), write(tmp_path / "questions.json", *QUESTIONS))
    flags |= {"vocab_file": tmp_path / "vocab.txt", "bert_config_file": records["bert_config_file"]}
    flags |= {"phase1_batch_size": 16, "phase2_batch_size": 16, "num_points": 1, "seeds": "1,2,4"}
    flags["output_dir"] = tmp_path / "all"
    flags["finetuning_flags"] = "--max_seq_length=32 --doc_stride=8 --max_query_length=16"
    mistake = {"pretraining_flags": "--num_train_steps=1"}
    assert run_benchmark("full_pretraining", **flags | mistake) == 2 and not (tmp_path / "all").exists()
    assert "must leave num_train_steps of phase1-packed-seed1" in capsys.readouterr().err
    tables = tables_of("full_pretraining", tmp_path, **flags)
    packed, _, random = tables["fine-tunings"]
    assert (packed["F1, median"], packed["F1, least"], packed["F1, most"]) == (27.0, 26.0, 29.0)
    assert packed["exact match, median"] == 12.5 and packed["fine-tunings"] == 3
    assert random["F1, most"] == 29.0
    phases = {row["variant"]: row for row in tables["pre-trainings"]}
    assert list(phases) == ["phase1-packed", "phase2-packed", "phase1-unpacked", "phase2-unpacked"]
    assert phases["phase2-packed"]["held out mlm_accuracy"] == 0.2
    assert phases["phase1-packed"]["complete"] == 1
