"""Training steps to time: engines with the default recipe, and functions that wait for the device.

Importing this imports no backend: a command chooses it first.
"""

import types

from bert_packed.architectures.registry import OBJECTIVE_HEADS, family_of
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.training.engines import make_engine

ADAMW = {"learning_rate": 1e-4, "weight_decay": 0.01, "max_grad_norm": 1.0}  # of peers, and ours beside them
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


def checkpoint_engine(init_checkpoint, text, objective, micro_batch_size=0):
    """An engine with a checkpoint's weights, and the optimizer of the peers.

    Args:
        init_checkpoint: Checkpoint to start from.
        text: `TextModel` of it.
        objective: `Objective`, whose head may be new.
        micro_batch_size: Packs at once; 0 is all of a step's.
    """
    from bert_packed.checkpoints import starting_weights
    from bert_packed.training.engines.engine import named_weights
    from bert_packed.training.optimization import AdamWeightDecay

    optimizer = AdamWeightDecay(
        ADAMW["learning_rate"],
        weight_decay_rate=ADAMW["weight_decay"],
        global_clipnorm=ADAMW["max_grad_norm"],
    )
    engine = build_engine(text.config, micro_batch_size, optimizer, objective)
    starting_weights.load(init_checkpoint, named_weights(engine.model), text.config, engine.model.head)
    return engine


def first_loss(engine, batch, count):
    """Loss of a batch over its sum `count`, by an engine's own passes, without dropout."""
    from bert_packed.training.backend import compiled

    compute = compiled(lambda batch: engine.gradients(batch, training=False)[1], engine.model)
    sums = compute(batch)
    return float(sums["loss"]) / float(sums[count])


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
