"""The engine that benchmarks of training run: packed model, losses and LAMB of the default recipe."""

from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.runs.pretraining_config import TrainConfig
from bert_packed.training.engines import make_engine
from bert_packed.training.optimization import build_optimizer

RECIPE = TrainConfig(input_file="-", output_dir="-")


def build_engine(model_config, remat=False, micro_batch_size=None):
    """An engine of the running backend with fresh weights.

    Args:
        model_config: `ModelConfig`.
        remat: As of `build_pretraining_model`.
        micro_batch_size: As of the engines.
    """
    objective = pretraining_objective(RECIPE.mlm_loss)
    model = objective.build_model(model_config, seed=0, remat=remat)
    return make_engine(model, objective, build_optimizer(RECIPE), micro_batch_size)
