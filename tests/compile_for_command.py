"""`run_pretraining.py --compile_for` of a tiny BERT, as a user has it: in a process of its own."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from packs import random_packs, write_packs
from tiny import CONFIG

ROOT = Path(__file__).parents[1]
LENGTH, PACKS, MICRO = 128, 8, 4
MODEL = dataclasses.replace(
    CONFIG,
    hidden_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=256,
    vocab_size=512,
    max_position_embeddings=LENGTH,
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
)


def write_all(folder):
    """Packs and the model's config: the folder."""
    packs = random_packs(np.random.default_rng(0), 4, LENGTH)
    write_packs(folder / "packed.tfrecord", packs, LENGTH, num_predictions=24)
    (folder / "bert_config.json").write_text(json.dumps(dataclasses.asdict(MODEL)))
    return folder


def environment(backend):
    """The environment of a user, without the options that tests compile with."""
    ours = ("XLA_FLAGS", "TF_XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_COMPILATION_CACHE_DIR")
    return {name: value for name, value in os.environ.items() if name not in ours} | {
        "KERAS_BACKEND": backend
    }


def command(folder, target, backend="jax", start=(ROOT / "run_pretraining.py",), **flags):
    """Run `run_pretraining.py --compile_for`: completed process, and its report where there is one."""
    flags = {
        "input_file": folder / "packed.tfrecord",
        "bert_config_file": folder / "bert_config.json",
        "train_batch_size": PACKS,
        "micro_batch_size": MICRO,
        "compile_only": folder / "compiled",
        "compile_for": target,
        **flags,
    }
    (folder / "compiled" / "step.json").unlink(missing_ok=True)
    argv = [f"--{name}={value}" for name, value in flags.items()]
    done = subprocess.run(
        [sys.executable, *start, *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment(backend),
    )
    written = folder / "compiled" / "step.json"
    return done, json.loads(written.read_text()) if written.exists() else None
