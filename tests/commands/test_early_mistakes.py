"""A training run that has no input says so before TensorFlow is imported."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import run_pretraining
sys.argv[1:] = {flags!r}
status = run_pretraining.command()
assert "tensorflow" not in sys.modules
sys.exit(status)
"""


@pytest.mark.parametrize("name", ["input_file", "eval_input_file", "unpacked_input_file"])
def test_a_missing_input_is_told_without_tensorflow(tmp_path, name):
    (tmp_path / "there.tfrecord").write_bytes(b"x")
    inputs = dict.fromkeys(("input_file", name), str(tmp_path / "there.tfrecord"))
    inputs[name] = str(tmp_path / "missing")
    flags = [f"--{flag}={path}" for flag, path in inputs.items()] + [f"--output_dir={tmp_path / 'run'}"]
    program = PROGRAM.format(flags=flags)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert f"`{name}` must match at least one file. Received: {str(tmp_path / 'missing')!r}." in ended.stderr
    assert not (tmp_path / "run").exists()
