"""The ways to take a training step that benchmarks compare: a plain BERT, ours, `transformers` on torch."""

from bert_packed.training.engines import make_engine
from data_gen.cli.settings import InputError

LOSS_TOLERANCE = 1e-4  # float32 sums over a vocabulary, in another order


def our_engines(model_config, micro_batch_size):
    """Engines by name: `plain`, a BERT that knows nothing of packs, and ours for `packed` and `unpacked`.

    Args:
        model_config: `ModelConfig`.
        micro_batch_size: As of the engines.
    """
    from bert_packed.reports import plain_bert
    from bert_packed.reports.benchmark_engine import RECIPE, build_engine
    from bert_packed.training.optimization import build_optimizer

    objective = plain_bert.plain_objective()
    plain = make_engine(
        objective.build_model(model_config), objective, build_optimizer(RECIPE), micro_batch_size
    )
    packed, unpacked = (build_engine(model_config, micro_batch_size=micro_batch_size) for _ in range(2))
    return {"plain": plain, "packed": packed, "unpacked": unpacked}


def way(engine, batches):
    """A function of the number of the repeat: a step on one of these batches, until the device is done."""

    def step(repeat):
        batch = batches[repeat % len(batches)]
        float(engine.train_step(batch)["num_sequences"])  # wait for the device

    return step


def torch_ways(model_config, rows):
    """Steps of one model of transformers on torch, after a check that it computes our loss.

    Args:
        model_config: `ModelConfig`.
        rows: Dict from name to a list of batch dicts at depth 1, whose rows may be of other lengths in each.

    Returns:
        Dict from name to a function of the number of the repeat.

    Raises:
        InputError: of the first batch it computes another loss from the same weights.
    """
    from bert_packed.objectives.pretraining import pretraining_objective
    from bert_packed.reports.torch_reference import TorchTraining, copy_model

    objective = pretraining_objective("per_token")
    model = objective.build_model(model_config, seed=0)
    training = TorchTraining(copy_model(model), learning_rate=1e-4, weight_decay=0.01, max_grad_norm=1.0)
    inputs = {name: [training.inputs(batch) for batch in batches] for name, batches in rows.items()}
    name, batches = next(iter(rows.items()))
    sums = objective.sums(model(batches[0], training=False), batches[0])
    ours = float(objective.loss(sums, objective.denominators(objective.counts(batches[0]))))
    theirs = training.loss(inputs[name][0])
    if abs(ours - theirs) > LOSS_TOLERANCE * abs(theirs):
        raise InputError(f"`reference` must compute our loss, {ours}. Received: {theirs}.")

    def step_of(some):
        return lambda repeat: training.step(some[repeat % len(some)])

    return {name: step_of(some) for name, some in inputs.items()}
