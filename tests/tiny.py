"""A tiny model, engine and data set for tests."""

import dataclasses
import json

import numpy as np
from packs import VOCAB_SIZE, random_packs, write_packs

from bert_packed.architectures.bert.config import ModelConfig

MAX_SEQ_LENGTH = 24
CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    max_position_embeddings=MAX_SEQ_LENGTH,
    initializer_range=0.3,
)
SHALLOW = dataclasses.replace(CONFIG, num_hidden_layers=1)


def make_engine(mlm_loss="per_sequence", config=CONFIG, seed=1, build=None, objective=None, **kwargs):
    """An engine around a new tiny model; `build` has further arguments of `Objective.build_model`."""
    # The import is here, so that tests without Keras can write files
    from bert_packed.objectives.pretraining import pretraining_objective
    from bert_packed.training import engines

    objective = objective or pretraining_objective(mlm_loss)
    return engines.make_engine(objective.build_model(config, seed, **(build or {})), objective, **kwargs)


def write_data(folder, num_packs=(9, 6), seed=0):
    """Write `packed-0.tfrecord`, ... and a model's `bert_config.json` with dropout; returns the paths."""
    rng = np.random.default_rng(seed)
    files = []
    for number, size in enumerate(num_packs):
        path = folder / f"packed-{number}.tfrecord"
        write_packs(path, random_packs(rng, size, MAX_SEQ_LENGTH), MAX_SEQ_LENGTH)
        files.append(str(path))
    config = dataclasses.replace(CONFIG, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    (folder / "bert_config.json").write_text(json.dumps(dataclasses.asdict(config)))
    return files


def manifest_of(**claims):
    """The manifest of packs of `write_data`, with other claims: dict."""
    histogram = {"lengths": [3, 6], "counts": [30, 6]}
    counts = {"num_packs": 15, "num_sequences": 36, "histogram": histogram}
    return {"kind": "packed", "files": [], **counts, **claims}


@dataclasses.dataclass
class Trained:
    """An engine, its first weights, figures of its steps, moments after the first, and the last state."""

    engine: object
    start: dict
    figures: list
    moments: dict
    weights: dict
    state: dict


def train_on(engine, batches):
    """Take a step of each batch: `Trained`."""
    start, (first, *rest) = values_of(engine.weights()), batches
    figures = [to_floats(engine.train_step(first))]
    moments = values_of(engine.training_state())
    figures += [to_floats(engine.train_step(batch)) for batch in rest]
    state = values_of(engine.training_state())
    return Trained(engine, start, figures, moments, values_of(engine.weights()), state)


def values_of(variables):
    return {name: np.array(variable.numpy()) for name, variable in variables.items()}


def to_floats(sums):
    """Sums of an engine's step as a dict of floats."""
    return {name: float(value) for name, value in sums.items()}


def replace_sums(engine, sums):
    """Let an engine that has not run yet compute other sums: `sums(outputs, batch)`."""
    engine.objective = dataclasses.replace(engine.objective, sums=sums)
