"""Under JAX a model trains and is audited where TensorFlow is missing, as on a machine with JAX alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="pip install -e '.[jax]'")

TOP = Path(__file__).resolve().parents[2]
# The package depends on these beside those of "Check and measure your device" in docs/start/accelerators.md
MISSING = ("tensorflow", "tensorboard", "matplotlib", "tokenizers", "sentencex", "safetensors", "tqdm")
PROGRAM = f"""
import sys

sys.modules.update(dict.fromkeys({MISSING}))  # None there: an import raises, and no package is found

from bert_packed.training.engines import choose_backend

choose_backend()
from packs import packed_and_unpacked
from tiny import CONFIG

from benchmarks import accelerator
from benchmarks.training_steps import build_engine
from bert_packed.evaluation import contamination

engine = build_engine(CONFIG)
packed, _ = packed_and_unpacked()
sums = engine.train_step(packed)
print(float(sums["num_sequences"]), float(sums["is_skipped"]))
print([check.name for check in contamination.audit(engine, packed) if not check.passed])
sizes = dict(max_seq_length=32, batch_size=2, repeats=1)
toy = accelerator.AcceleratorConfig(models="bert-tiny", **sizes, parts="exactness,steps")
print("status", accelerator.main(toy))
"""


def test_a_step_and_the_audit_without_tensorflow():
    path = os.pathsep.join([str(TOP), str(TOP / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    step, failed, *_, status = done.stdout.splitlines()
    assert status == "status 0"
    num_sequences, is_skipped = map(float, step.split())
    assert num_sequences > 0 and is_skipped == 0 and failed == "[]"
