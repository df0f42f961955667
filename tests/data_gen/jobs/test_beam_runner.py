"""Mistakes with Apache Beam end in one line: its options, its runner's failures, notes that nobody finds."""

import importlib.util
import logging
import sys
import types

import pytest
from recorded_calls import run
from unpacked_records import make_features, write_features

from bert_packed.core.settings import InputError
from data_gen.jobs.steps import Job, Step
from data_gen.pack_config import PackConfig
from data_gen.pack_tfrecords import main

HAS_BEAM = importlib.util.find_spec("apache_beam") is not None
needs_beam = pytest.mark.skipif(not HAS_BEAM, reason="needs the extra `beam`")
pytestmark = pytest.mark.filterwarnings("default")  # Beam's own are not ours to fix


def fail(number):
    if number == 1:
        raise ZeroDivisionError("a mistake of ours")
    if number == 2:
        raise InputError("a mistake of the user's")
    return number


def mistake(runner, options, tmp_path, monkeypatch):
    """The one line of packing with this runner and these options, without the name of the command."""
    monkeypatch.setenv("BEAM_OPTIONS", options)
    path = write_features(tmp_path / "in.tfrecord", make_features([5, 6], 16))
    flags = {"input_file": path, "output_dir": tmp_path / "out", "max_seq_length": 16, "runner": runner}
    seen = run(main, PackConfig, **flags)
    assert seen.status == 2 and not (tmp_path / "out").exists()
    (line,) = [line for line in seen.error.splitlines() if line.startswith("command: error: ")]
    return line.removeprefix("command: error: ")


OPTIONS = "--project=p --temp_location=gs://b/tmp --staging_location=gs://b/tmp"


@needs_beam
@pytest.mark.parametrize(
    ("runner", "options", "message"),
    [
        ("DirectRunner", "--direct_num_workers=few", "invalid int value: 'few'"),
        ("DirectRunner", "--direct_running_mode=well", "invalid choice: 'well'"),
        ("DirectRunner", "--setup_file", "argument --setup_file: expected one argument"),
        ("DirectRunner", "'--setup_file=x", "No closing quotation"),
        ("DirectRunner", "--nosuch_flag=1", "--nosuch_flag is none"),
        ("DirectRunner", "stray", "stray is none"),
        ("FlinkRunner", "--parallelism=2 --flink_masterr=host:1", "--flink_masterr is none"),
        ("SparkRunner", "--parallelism=2 --flink_masterr=host:1", "--flink_masterr is none"),
        ("DataflowRunner", OPTIONS, "Missing required option: region"),
        ("PortableRunner", "--job_endpoint=127.0.0.1:9", "no job server at --job_endpoint=127.0.0.1:9: "),
    ],
)
def test_options_that_are_none(tmp_path, monkeypatch, runner, options, message):
    from data_gen.jobs import beam_runner

    monkeypatch.setattr(beam_runner, "PARTS", {})
    line = mistake(runner, options, tmp_path, monkeypatch)
    assert line.startswith(f"`BEAM_OPTIONS` must be flags of {runner}: ") and message in line
    assert line.endswith(f"Received: {options!r}.")


@needs_beam
@pytest.mark.skipif(importlib.util.find_spec("apitools") is not None, reason="apache-beam[gcp] is installed")
def test_dataflow_that_is_not_installed(tmp_path, monkeypatch):
    line = mistake("DataflowRunner", "", tmp_path, monkeypatch)
    assert "pip install 'apache-beam[gcp]'. Received: " in line


@needs_beam
def test_options_of_a_job_server_are_passed_on_after_a_lone_dash(monkeypatch):
    from data_gen.jobs import beam_runner

    monkeypatch.setenv("BEAM_OPTIONS", "--parallelism=2 -- --of_the_server=7")
    options = beam_runner._make_pipeline("FlinkRunner")._options
    found = options.get_all_options(retain_unknown_options=True)
    assert (found["parallelism"], found["of_the_server"]) == (2, "7")
    with pytest.raises(InputError, match="--of_the_server=7 is for a job server, which DirectRunner has not"):
        beam_runner._make_pipeline("DirectRunner")


@needs_beam
def test_a_runner_that_fails_is_named(tmp_path, monkeypatch):
    from data_gen.jobs import beam_runner

    def fail_to_start(self, *arguments, **named):
        raise RuntimeError("first line\nno job server at localhost:8099")

    monkeypatch.setattr(beam_runner.beam.Pipeline, "run", fail_to_start)
    with pytest.raises(
        OSError, match=r"^DirectRunner failed: RuntimeError: no job server at localhost:8099$"
    ):
        beam_runner.run_pipeline("DirectRunner", fail, [0], str(tmp_path))


@needs_beam
def test_mistakes_of_users_and_ours_are_distinguished(tmp_path, caplog):
    from data_gen.jobs import beam_runner

    with pytest.raises(InputError, match=r"^a mistake of the user's$"):
        beam_runner.run_pipeline("DirectRunner", fail, [0, 2], str(tmp_path))
    with caplog.at_level(logging.CRITICAL), pytest.raises(Exception, match="a mistake of ours") as error:
        beam_runner.run_pipeline("DirectRunner", fail, [0, 1], str(tmp_path))
    assert not isinstance(error.value, OSError | InputError)  # so that its traceback is shown


def test_a_result_that_is_missing_is_an_error(tmp_path, monkeypatch):
    """A machine may see another disk under the name of `output_dir`."""
    deaf = types.ModuleType("data_gen.jobs.beam_runner")
    deaf.run_pipeline = lambda *arguments: None
    monkeypatch.setitem(sys.modules, "data_gen.jobs.beam_runner", deaf)
    with (
        pytest.raises(
            OSError, match=r"read-1\.done is missing after FlinkRunner has ended: all its machines"
        ),
        Job(tmp_path, runner="FlinkRunner") as job,
    ):
        job.run([Step("read-1", fail, 0)], "read")
