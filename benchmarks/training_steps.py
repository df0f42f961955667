"""Training steps to time: engines with the default recipe, and functions that wait for the device.

Importing this imports no backend: a command chooses it first.
"""

import types

from bert_packed.architectures.registry import OBJECTIVE_HEADS, family_of
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.training.engines import make_engine

RECIPE = PretrainingConfig(input_file="-", output_dir="-")  # the defaults of a run: losses and LAMB


def build_engine(model_config, micro_batch_size=0, optimizer=None, objective=None, **model):
    """An engine of the running backend for pre-training, with fresh weights; LAMB of the default recipe.

    Args:
        micro_batch_size: Packs at once; 0 is all of a step's.
        optimizer, objective: Optimizer and objective; by default those of the recipe.
        model: Options of `packed_model.build_model`, such as `dtype` and `remat`.
    """
    from bert_packed.training.optimization import build_optimizer

    objective = objective or objective_of(model_config)
    built = objective.build_model(model_config, seed=0, **model)
    return make_engine(built, objective, optimizer or build_optimizer(RECIPE), micro_batch_size or None)


def kernel_options(model_config, max_seq_length, platform):
    """Options of a model that computes in the platform's fused kernels; {} where there are none."""
    from bert_packed.kernels.choose import choose_kernels

    return choose_kernels("auto", model_config, max_seq_length, platform).options


def first_head(model_config):
    """The head that models of a config's family are pre-trained with."""
    return family_of(model_config).heads[0]


def objective_kind(model_config):
    """The `--objective` that models of a config's family are pre-trained with by default."""
    return next(kind for kind, head in OBJECTIVE_HEADS.items() if head == first_head(model_config))


def objective_of(model_config, weighting=None):
    """The `Objective` that a model is pre-trained by; `weighting` of the loss is by default the recipe's."""
    from bert_packed.objectives.pretraining import choose_objective

    kind = objective_kind(model_config)
    weightings = types.SimpleNamespace(mlm_loss=weighting, lm_loss=weighting) if weighting else RECIPE
    return choose_objective(kind, model_config, weightings)


def stepping(engine, batches):
    """A function of the repeat for `time_interleaved`: a step on one of the batches."""

    def step(repeat):
        batch = batches[repeat % len(batches)]
        engine.train_step(batch)

    return step


def stepping_through(engine, batches):
    """A function of the repeat for `time_interleaved`: a step on each of the batches."""

    def steps(_):
        for batch in batches:
            sums = engine.start_step(batch)
        # Each step needs the weights of the one before: waiting for the last waits for all
        engine.read(sums)

    return steps
