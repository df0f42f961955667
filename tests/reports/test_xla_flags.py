"""`xla_flags` times every way under every micro-batch size, and tells of those that end a process."""

import dataclasses
import json

import keras
import pytest

from bert_packed.reports import xla_flags
from bert_packed.reports.benchmark_engine import RECIPE
from bert_packed.runs.step_turns import StepTimes
from bert_packed.runs.xla_ways import DEFAULT, WAYS
from data_gen.cli.settings import InputError

BACKEND = keras.backend.backend()
FAILED = "no XNNPACK"
SHORT = {"bert_config_file": "bert-tiny", "batch_size": 4, "max_seq_length": 32}


def take(monkeypatch, seconds, failed=()):
    """Let steps take `seconds(name, size)`, but of `failed` names: what was to be timed, round by round."""
    rounds = []

    def time_steps(steps, num_turns):
        rounds.append((steps, num_turns))
        why = dict.fromkeys([key for key in steps if key[0] in failed], "x.py: error: Unknown flag")
        return StepTimes(True, {key: [seconds(*key)] * 3 for key in steps if key not in why}, why)

    monkeypatch.setattr(xla_flags, "time_steps", time_steps)
    return rounds


@pytest.mark.both_backends
def test_every_way_is_timed_beside_the_first_size_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    rounds = take(monkeypatch, lambda name, size: 1.0 + size + (name != DEFAULT), [FAILED])
    target = tmp_path / "flags.json"
    xla_flags.main(xla_flags.FlagsConfig(**SHORT, micro_batch_sizes="0,2", turns=5, json=str(target)))
    names = [name for name in WAYS if (BACKEND, name) != ("tensorflow", "no YNNPACK")]
    (first, num_turns), (second, _) = rounds
    assert num_turns == 5
    assert list(first) == [(name, 0) for name in names]
    assert list(second) == [(DEFAULT, 0), *((name, 2) for name in names)]
    for (name, size), step in second.items():
        assert step.environment == {"XLA_FLAGS": f"--mine {WAYS[name]}".strip()}
        expected = dataclasses.replace(
            RECIPE,
            input_file=step.config.input_file,
            bert_config_file="bert-tiny",
            train_batch_size=4,
            micro_batch_size=size,
        )
        assert step.config == expected
    rows = {(row["XLA_FLAGS"], row["micro_batch_size"]): row for row in json.loads(target.read_text())}
    assert list(rows) == [(name, size) for size in (0, 2) for name in names]
    # by the clock above: 1 and 2 s whole, 3 and 4 s in parts
    assert [rows[name, size]["times as long"] for size in (0, 2) for name in names[:2]] == [1, 2, 3, 4]
    assert rows[FAILED, 0]["step, s"] is None
    told = [f"{WAYS[FAILED]}, micro_batch_size={size}: x.py: error: Unknown flag" for size in (0, 2)]
    assert capsys.readouterr().err.splitlines() == told


@pytest.mark.both_backends
def test_the_packs_are_as_long_as_asked_for(monkeypatch):
    def time_steps(steps, _):
        from data_gen.records import first_records
        from data_gen.records.inputs import find_files

        (config,) = {step.config for step in steps.values()}
        specs.append(first_records.read_pack_spec(find_files(config.input_file, "input_file")))
        return StepTimes(True, {key: [1.0] for key in steps}, {})

    specs = []
    monkeypatch.setattr(xla_flags, "time_steps", time_steps)
    xla_flags.main(xla_flags.FlagsConfig(**SHORT))
    assert [(spec.max_seq_length, spec.max_sequences_per_pack) for spec in specs] == [(32, 3)]


def test_a_step_that_no_setting_can_take_is_a_mistake(monkeypatch):
    take(monkeypatch, lambda *_: 1.0, [DEFAULT])
    with pytest.raises(InputError, match=r"^Unknown flag$"):
        xla_flags.main(xla_flags.FlagsConfig(**SHORT))


def test_a_process_that_ends_without_a_reason_is_told_by_its_status(monkeypatch):
    ended = StepTimes(True, {}, {(DEFAULT, 0): "killed by signal 9"})
    monkeypatch.setattr(xla_flags, "time_steps", lambda *_: ended)
    with pytest.raises(InputError, match=r"^a step must run without .*\. Received: killed by signal 9\.$"):
        xla_flags.main(xla_flags.FlagsConfig(**SHORT))


def test_a_backend_that_is_none_is_a_mistake(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with pytest.raises(InputError, match=r"^KERAS_BACKEND must be one of .*Received: torch\.$"):
        xla_flags.main(xla_flags.FlagsConfig())


@pytest.mark.parametrize("sizes", ["3", "-1", "x"])
def test_micro_batches_must_divide(sizes):
    with pytest.raises(InputError, match=r"`micro_batch_sizes` must be .*Received: "):
        xla_flags.FlagsConfig(batch_size=8, micro_batch_sizes=sizes)
