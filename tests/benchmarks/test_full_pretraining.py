"""Pre-training in two phases and its fine-tunings: what is taken, counted and refused."""

import dataclasses
import glob
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from curve_logs import write_log
from safetensors.numpy import load_file
from squad_files import QUESTIONS, write
from tiny import CONFIG

from benchmarks import full_pretraining, kept_runs, taken_runs
from benchmarks.full_pretraining import FILES, FullConfig
from benchmarks.planned_runs import settings_of
from benchmarks.pretraining_stages import make_runs
from benchmarks.synthetic_data import VOCAB_SIZE, write_sequences
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from bert_packed.text import tokenization
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack

GIVEN = {name: name for name in FILES} | {"output_dir": "o"}
FACTORS = {"phase1": 2.0, "phase2": 4.0}
LENGTH = 48


def command(**flags):
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    return run(full_pretraining.main, FullConfig, "", ["full_pretraining", *arguments])


@pytest.fixture(autouse=True)
def named_files(monkeypatch, tmp_path):
    """Work where the files that `GIVEN` names are: flags of fine-tuning are checked against the disk."""
    monkeypatch.chdir(tmp_path)
    for name in ("train_file", "predict_file", "vocab_file"):
        (tmp_path / name).touch()


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Flags of a tiny pre-training: records of both phases, a model for them, questions."""
    folder = tmp_path_factory.mktemp("full")
    given = {}
    for phase, length in (("phase1", 24), ("phase2", LENGTH)):
        paths = write_sequences(folder / phase, 40, length, num_files=1)
        for name, depth in (("packed", "max"), ("unpacked", 1)):
            output = folder / f"{phase}-{name}"
            output.mkdir()
            pack(
                PackConfig(
                    input_file=paths[0],
                    output_dir=str(output),
                    max_seq_length=length,
                    max_sequences_per_pack=depth,
                    num_shards=1,
                )
            )
            given[f"{phase}_{name}"] = f"{output}/*.tfrecord"
        given[f"{phase}_eval"] = given[f"{phase}_unpacked"]
        given |= {f"{phase}_sequences": 32, f"{phase}_batch_size": 16}
    questions = write(folder / "questions.json", *QUESTIONS)
    words = tokenization.train_vocab([["a b c who wrote the first program"]], 60, do_lower_case=True).tokens
    rest = [f"[unused{number}]" for number in range(VOCAB_SIZE - len(words))]
    text = "\n".join([*words, *rest]) + "\n"
    (folder / "vocab.txt").write_text(text)
    for path in folder.glob("*/manifest.json"):  # as records of texts have it
        manifest = json.loads(path.read_text()) | {"vocab_sha256": hashlib.sha256(text.encode()).hexdigest()}
        path.write_text(json.dumps(manifest))
    model = dataclasses.replace(
        CONFIG, vocab_size=VOCAB_SIZE, num_hidden_layers=1, max_position_embeddings=LENGTH
    )
    (folder / "bert_config.json").write_text(json.dumps(dataclasses.asdict(model)))
    return {
        **given,
        "train_file": questions,
        "predict_file": questions,
        "vocab_file": folder / "vocab.txt",
        "bert_config_file": folder / "bert_config.json",
        "num_points": 1,
        "seeds": "1",
        "finetuning_flags": f"--max_seq_length={LENGTH} --doc_stride=8 --max_query_length=16 "
        "--train_batch_size=4 --num_train_epochs=1 --learning_rate=0.01",
    }


def describe(pattern):
    """As run.json describes the files of a flag."""
    paths = sorted(glob.glob(str(pattern)))
    return [{"path": path, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()} for path in paths]


def finish(one, folder):
    """Leave what a run leaves that came to its end; one that goes on keeps how it began; 0, as `take`."""
    path = Path(folder) / one.name
    weights = path / "checkpoint-2" / "model.safetensors"
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.touch()
    if not (path / "run.json").exists():
        wanted = settings_of(one, folder)
        names = ("train_file",) if "squad" in one.name else ("input_file", "eval_input_file")
        inputs = {name: describe(getattr(wanted, name)) for name in names}
        found = {"flags": dataclasses.asdict(wanted), "inputs": inputs}
        (path / "run.json").write_text(json.dumps(found))
        (path / "resolved.flags").touch()
    if "squad" in one.name:
        (path / "eval_results.json").write_text('{"exact_match": 12.5, "f1": 25.0}')
    else:
        last = one.flags["num_train_steps"]
        for log in ("metrics.csv", "eval_metrics.csv"):
            write_log(path / log, [(last, 9, 7.0, 0.25, 5)])
    return 0


def test_only_what_is_not_complete_is_taken_and_the_table_is_of_what_is_there(
    flags, monkeypatch, tmp_path, capsys
):
    """Without training: what runs leave, until one is stopped."""
    taken = []

    def finish_or_stop(one, folder):
        taken.append(one.name)
        return 143 if one.name == "phase2-unpacked-seed1" else finish(one, folder)

    monkeypatch.setattr(taken_runs, "take", finish_or_stop)
    given = {**flags, "output_dir": tmp_path / "all", "json": tmp_path / "table.json"}
    assert command(**given, table_only=True) == 0 and not taken
    assert command(**given) == 143
    done = ["phase1-packed-seed1", "phase2-packed-seed1", "squad-packed1-seed1", "phase1-unpacked-seed1"]
    assert taken == [*done, "phase2-unpacked-seed1"]
    packed, unpacked, random = json.loads((tmp_path / "table.json").read_text())
    assert (packed["F1, median"], packed["exact match, median"], packed["fine-tunings"]) == (25.0, 12.5, 1)
    assert packed["phase2 held-out accuracy"] == unpacked["phase1 held-out accuracy"] == 0.25
    assert unpacked["F1, median"] is None and random["fine-tunings"] == 0
    assert command(**given) == 143 and taken[5:] == ["phase2-unpacked-seed1"]
    capsys.readouterr()
    assert command(**given, print_commands=True) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 7 and sum("run_squad.py" in line for line in printed) == 3


@pytest.fixture
def takes(monkeypatch, flags, tmp_path):
    """Function from changed flags to the status of the command, and the names of the runs that it took."""

    def take_with(**changes):
        taken = []

        def finish_and_note(one, folder):
            taken.append(one.name)
            return finish(one, folder)

        monkeypatch.setattr(taken_runs, "take", finish_and_note)
        given = {**flags, "output_dir": tmp_path / "all", "only": "packed", "json": tmp_path / "table.json"}
        return command(**{**given, **changes}), taken

    return take_with


def read_table(tmp_path):
    return json.loads((tmp_path / "table.json").read_text())


def test_questions_are_answered_again_when_they_or_the_scoring_changed(takes, flags, tmp_path, capsys):
    """A training may go on under either; its scores are of one."""
    squad = ["squad-packed1-seed1"]
    assert takes() == (0, ["phase1-packed-seed1", "phase2-packed-seed1", *squad])
    assert takes() == (0, [])
    other = write(tmp_path / "other.json", *QUESTIONS)
    changed = {"predict_file": other}
    capsys.readouterr()
    assert takes(**changed, table_only=True) == (0, [])
    assert "squad-packed1-seed1 is left out: its run.json has predict_file=" in capsys.readouterr().err
    assert read_table(tmp_path)[0]["fine-tunings"] == 0
    assert takes(**changed) == (0, squad)
    assert takes(**changed) == (0, [])  # though run.json keeps the flags of the training
    assert read_table(tmp_path)[0]["fine-tunings"] == 1
    assert takes() == (0, squad)
    for more in ("--max_answer_length=7", "--n_best_size=3", "--null_score_diff_threshold=1"):
        changed = {"finetuning_flags": f"{flags['finetuning_flags']} {more}"}
        assert takes(**changed) == (0, squad) and takes(**changed) == (0, [])
    assert takes() == (0, squad)
    assert takes(finetuning_flags=f"{flags['finetuning_flags']} --predict_batch_size=3") == (0, [])


def test_questions_that_changed_in_place_are_answered_again(takes, flags, tmp_path, capsys):
    questions = tmp_path / "own.json"
    questions.write_bytes(Path(flags["predict_file"]).read_bytes())
    assert takes(predict_file=questions)[0] == 0
    write(questions, QUESTIONS[0])
    capsys.readouterr()
    assert takes(predict_file=questions, table_only=True) == (0, [])
    assert f"left out: {questions} is not what it was when the run was made" in capsys.readouterr().err
    assert read_table(tmp_path)[0]["fine-tunings"] == 0
    assert takes(predict_file=questions) == (0, ["squad-packed1-seed1"])
    assert takes(predict_file=questions) == (0, []) and read_table(tmp_path)[0]["fine-tunings"] == 1


def test_records_that_were_packed_anew_stop_the_set_before_its_first_run(takes, flags, tmp_path, capsys):
    folder = tmp_path / "phase2"
    shutil.copytree(Path(flags["phase2_packed"]).parent, folder)
    changed = {"phase2_packed": f"{folder}/*.tfrecord"}
    assert takes(**changed)[0] == 0
    (path,) = folder.glob("*.tfrecord")
    frames = path.read_bytes()
    path.write_bytes(frames + frames)  # twice the packs, whatever the manifest counts
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][0]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert takes(**changed, table_only=True) == (0, [])
    told = capsys.readouterr().err
    for name in ("phase2-packed-seed1", "squad-packed1-seed1"):  # the second by the first
        assert f"{name} is left out: {path} is not what it was when the run was made" in told
    (row,) = read_table(tmp_path)
    assert row["phase1 held-out accuracy"] == 0.25
    assert row["phase2 held-out accuracy"] is None and row["fine-tunings"] == 0
    assert takes(**changed, seeds="1,2") == (2, [])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"Received: phase2-packed-seed1, squad-packed1-seed1, made before {path} changed; removed" in line
    for name in ("phase2-packed-seed1", "squad-packed1-seed1"):
        shutil.rmtree(tmp_path / "all" / name)
    assert takes(**changed) == (0, ["phase2-packed-seed1", "squad-packed1-seed1"])


def test_an_answer_that_was_stopped_is_not_taken_for_the_one_before_it(takes, flags, monkeypatch, tmp_path):
    assert takes()[0] == 0
    monkeypatch.setattr(taken_runs, "take", lambda one, folder: 143)
    given = {**flags, "output_dir": tmp_path / "all", "only": "packed"}
    given["finetuning_flags"] += " --max_answer_length=7"
    assert command(**given) == 143
    assert takes(finetuning_flags=given["finetuning_flags"])[1] == ["squad-packed1-seed1"]


def test_runs_from_weights_that_were_taken_anew_are_told_and_not_counted(takes, tmp_path, capsys):
    assert takes()[0] == 0
    weights = tmp_path / "all" / "phase1-packed-seed1" / "checkpoint-2" / "model.safetensors"
    later = weights.stat().st_mtime_ns + 10**12
    os.utime(weights, ns=(later, later))
    capsys.readouterr()
    assert takes(table_only=True) == (0, [])
    told = capsys.readouterr().err
    for name in ("phase2-packed-seed1", "squad-packed1-seed1"):  # the second by the first
        assert f"{name} is left out: what it began from was taken anew since" in told
    row = read_table(tmp_path)[0]
    assert row["phase1 held-out accuracy"] == 0.25
    assert row["phase2 held-out accuracy"] is None and row["fine-tunings"] == 0
    assert takes() == (2, [])
    told = capsys.readouterr().err
    assert "Received: phase2-packed-seed1, squad-packed1-seed1, begun before" in told
    assert len(told.strip().splitlines()) == 1


def test_runs_whose_start_is_yet_to_be_taken_are_told_before_the_first(takes, tmp_path, capsys):
    assert takes()[0] == 0
    (tmp_path / "all" / "phase1-packed-seed1").rename(tmp_path / "aside")
    capsys.readouterr()
    assert takes() == (2, [])
    assert "Received: phase2-packed-seed1, squad-packed1-seed1, begun before" in capsys.readouterr().err


def test_a_folder_is_the_same_by_each_of_its_names(takes, tmp_path):
    assert takes(output_dir="all")[0] == 0  # where the test works
    assert takes(output_dir=tmp_path / "all") == (0, [])
    assert read_table(tmp_path)[0]["fine-tunings"] == 1
    runs = sorted((tmp_path / "all").glob("*/run.json"))
    for path in runs:  # as kept by a version that did not resolve them
        content = json.loads(path.read_text())
        if content["flags"]["init_checkpoint"]:
            content["flags"]["init_checkpoint"] = os.path.relpath(content["flags"]["init_checkpoint"])
            path.write_text(json.dumps(content))
    assert takes() == (0, [])
    one = next(
        one for one in make_runs(FullConfig(**GIVEN | {"output_dir": "all"}), FACTORS) if "2" in one.name
    )
    assert kept_runs.as_begun(one, "all").flags["init_checkpoint"] == "all/phase1-packed-seed1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phase2_eval": "none-*"}, "`phase2_eval` must match at least one file. Received: 'none-*'"),
        (
            {"vocab_file": "vocab_file"},
            "`vocab_file` must be the one that the records of phase1 were made with",
        ),
        ({"bert_config_file": "short.json"}, "the longest sequence of `phase2_packed` must be at most"),
        (
            {"finetuning_flags": "--max_seq_length=200"},
            "`finetuning_flags` must give a max_seq_length of at most max_position_embeddings=48",
        ),
        ({"predict_file": "predict_file"}, "predict_file must be JSON"),
        ({"finetuning_flags": "--vocab_file=x"}, "`finetuning_flags` must leave vocab_file as it is"),
        ({"finetuning_flags": "--do_predict=false"}, "`finetuning_flags` must leave do_predict as it is"),
        (
            {"pretraining_flags": "--init_checkpoint=x"},
            "`pretraining_flags` must leave init_checkpoint as it",
        ),
    ],
)
def test_mistakes_of_later_runs_show_before_the_first(flags, monkeypatch, tmp_path, capsys, changes, message):
    monkeypatch.setattr(taken_runs, "take", lambda one, folder: pytest.fail("a run was taken"))
    (tmp_path / "x").touch()
    model = json.loads(Path(flags["bert_config_file"]).read_text())
    (tmp_path / "short.json").write_text(json.dumps(model | {"max_position_embeddings": 24}))
    assert command(**{**flags, "output_dir": tmp_path / "all", **changes}) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


@pytest.mark.slow
def test_phase_2_starts_from_phase_1_and_answers_come_from_phase_2(flags, tmp_path):
    """Real runs, whose second phase and fine-tuning learn nothing: their encoders are those of phase 1."""
    given = {**flags, "output_dir": tmp_path / "all", "json": tmp_path / "table.json"}
    given |= {"phase2_learning_rate": 0, "only": "packed,random", "seeds": 2}
    given["finetuning_flags"] += " --learning_rate=1e-12"
    assert command(**given) == 0
    files = {
        name: sorted((tmp_path / "all" / name).glob("checkpoint-*/model.safetensors"))[-1]
        for name in (
            "phase1-packed-seed1",
            "phase2-packed-seed1",
            "squad-packed1-seed2",
            "squad-random-seed2",
        )
    }
    first, second, answers, random = (load_file(path) for path in files.values())
    assert all(np.array_equal(second[name], first[name]) for name in first)
    encoder = [name for name in first if name in answers and name.startswith("bert/")]
    assert len(encoder) > 10
    for name in encoder:
        np.testing.assert_allclose(answers[name], first[name], rtol=0, atol=1e-9)
    kernels = [name for name in encoder if name.endswith("kernel")]
    assert kernels and all(np.abs(random[name] - first[name]).max() > 0.1 for name in kernels)
    rows = json.loads((tmp_path / "table.json").read_text())
    for row, name in zip(rows, ("squad-packed1-seed2", "squad-random-seed2"), strict=True):
        scores = json.loads((tmp_path / "all" / name / "eval_results.json").read_text())
        assert (row["F1, median"], row["fine-tunings"]) == (scores["f1"], 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phase2_eval": ""}, "`phase2_eval` must be given"),
        ({"vocab_file": ""}, "`vocab_file` must be given"),
        ({"only": "packed,none"}, "`only` must be different ones of packed, unpacked, random"),
        ({"seeds": "1,1"}, "`seeds` must be different whole numbers"),
        ({"pretraining_seeds": "a"}, "`pretraining_seeds` must be different whole numbers"),
        (
            {"phase2_batch_size": 9, "micro_batch_size": 2},
            "`micro_batch_size` must divide `phase2_batch_size`",
        ),
    ],
)
def test_mistakes_in_flags_are_told(changes, message):
    with pytest.raises(InputError, match=message):
        FullConfig(**{**GIVEN, **changes})


def test_a_mistake_in_the_last_runs_flags_shows_before_the_first(flags, tmp_path, capsys):
    given = {**flags, "output_dir": tmp_path / "all", "finetuning_flags": "--learning_rate=fast"}
    assert command(**given) == 2
    assert "learning_rate" in capsys.readouterr().err
    swapped = {**flags, "output_dir": tmp_path / "all", "phase2_unpacked": flags["phase1_unpacked"]}
    swapped["phase2_packed"] = flags["phase2_unpacked"]
    assert command(**{**swapped, "phase2_unpacked": flags["phase2_packed"]}) == 2
    assert (
        "`phase2_unpacked` must hold the 40 sequences of phase2_packed at depth 1" in capsys.readouterr().err
    )
    assert not (tmp_path / "all").exists()
