"""Train the tiny model under the backend of a new process: `python other_backend.py FOLDER`.

FOLDER holds `checkpoint-0` of a run, and `dropout/checkpoint-1` of one with dropout. It receives
`losses.json`, those of the steps that follow the former, and `resaved/checkpoint-1`, the latter as read and
written again.
"""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
from packs import packed_and_unpacked
from tiny import CONFIG, make_engine, to_floats

from bert_packed.checkpoints import checkpoint
from bert_packed.training.optimization import Lamb

NUM_STEPS = 20
LEARNING_RATE = 0.01
STATE = {"interval": {}, "evaluation_due": False}  # of a loop that has just begun
WITH_DROPOUT = dataclasses.replace(CONFIG, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)


def training_engine(config=CONFIG, micro_batch_size=2):
    """An engine with LAMB as a run has it, two micro-batches and more a step."""
    optimizer = Lamb(
        LEARNING_RATE,
        weight_decay_rate=0.01,
        global_clipnorm=1.0,
    )
    return make_engine(config=config, optimizer=optimizer, micro_batch_size=micro_batch_size)


def batch_at(step):
    """Ten packs, the same in every process."""
    packed, _ = packed_and_unpacked(step % 4)
    return {name: np.concatenate([values, values[::-1]]) for name, values in packed.items()}


def train(engine, steps):
    """Both losses of every step: list of pairs."""
    sums = [to_floats(engine.train_step(batch_at(step))) for step in steps]
    return [(one["mlm_loss"], one["nsp_loss"]) for one in sums]


def main(folder):
    engine = training_engine()
    checkpoint.restore_checkpoint(folder / "checkpoint-0", engine)
    (folder / "losses.json").write_text(json.dumps(train(engine, range(NUM_STEPS))))
    engine = training_engine(WITH_DROPOUT)
    checkpoint.restore_checkpoint(folder / "dropout" / "checkpoint-1", engine)
    checkpoint.save_checkpoint(folder / "resaved", 1, engine, WITH_DROPOUT, STATE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
