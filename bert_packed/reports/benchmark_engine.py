"""The engine that benchmarks of training run: packed model, losses and LAMB of the default recipe."""

import functools

from bert_packed.config import TrainConfig
from bert_packed.models.modeling import build_pretraining_model
from bert_packed.objectives.losses import normalizers, pretraining_sums
from bert_packed.objectives.metrics import SUM_NAMES
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
    return make_engine(
        build_pretraining_model(model_config, seed=0, remat=remat),
        functools.partial(pretraining_sums, mlm_loss=RECIPE.mlm_loss),
        SUM_NAMES,
        functools.partial(normalizers, mlm_loss=RECIPE.mlm_loss),
        build_optimizer(RECIPE),
        micro_batch_size=micro_batch_size,
    )
