"""What a run learns: its objective, which the model must be made for and the records must hold."""

from bert_packed.config import MambaConfig, ModelConfig
from bert_packed.objectives.next_tokens import next_token_objective
from bert_packed.objectives.pretraining import pretraining_objective
from data_gen.cli.settings import InputError
from data_gen.schema import CAUSAL_LM, MLM_NSP

# `--objective` -> what the model's config is, and how people call such a model
MODELS = {MLM_NSP: (ModelConfig, "BERT"), CAUSAL_LM: (MambaConfig, "Mamba")}


def choose_objective(objective, model_config, config):
    """What a run learns, an `Objective`.

    Args:
        objective: One of `schema.OBJECTIVES`.
        model_config: Of the model that learns it.
        config: Anything with `mlm_loss` and `lm_loss`.

    Raises:
        InputError: the model is another kind's.
    """
    kind, name = MODELS[objective]
    if not isinstance(model_config, kind):
        theirs = next(name for kind, name in MODELS.values() if isinstance(model_config, kind))
        raise InputError(f"`objective` {objective} needs a model that is a {name}. Received: a {theirs}.")
    if objective == CAUSAL_LM:
        return next_token_objective(config.lm_loss)
    return pretraining_objective(config.mlm_loss, not model_config.ablation_no_next_sentence)


def check_records(config, name, packs):
    """Raise `InputError` where the records that a flag names are not for the objective.

    Args:
        config: With `objective`.
        name: The flag.
        packs: `PackedFiles` that it names.
    """
    if packs.files and packs.spec.objective != config.objective:
        raise InputError(
            f"`{name}` must hold records for objective={config.objective}. Received: {packs.files[0]}, for "
            f"{packs.spec.objective}."
        )
