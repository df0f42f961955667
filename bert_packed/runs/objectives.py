"""The objective of a run, and checks that the model is made for it and that the records hold it."""

import dataclasses

from bert_packed.architectures.registry import FAMILIES, OBJECTIVE_HEADS, family_of
from bert_packed.core.settings import InputError
from bert_packed.objectives.pretraining import (
    masked_lm_objective,
    next_token_objective,
    pretraining_objective,
)
from bert_packed.schema import CAUSAL_LM, FORMS, MLM, MLM_NSP


def choose_objective(objective, model_config, config, num_rows=0):
    """The `Objective` of a run; raises `InputError` where the model is of a family without its head.

    Args:
        objective: One of `schema.OBJECTIVES`.
        config: Anything with `mlm_loss` and `lm_loss`.
        num_rows: R, rows in which packs follow one another; 0 for none.
    """
    family, head = family_of(model_config), OBJECTIVE_HEADS[objective]
    if head not in family.heads:
        able = [one.name for one in FAMILIES.values() if head in one.heads]
        raise InputError(
            f"`bert_config_file` must be a {' or '.join(able)} for objective={objective}. "
            f"Received: a {family.name}."
        )
    if objective == CAUSAL_LM:
        return next_token_objective(config.lm_loss, goes_on=num_rows > 0)
    if objective == MLM:
        return masked_lm_objective(config.mlm_loss)
    return pretraining_objective(config.mlm_loss, not model_config.ablation_no_next_sentence)


def check_losses(config, objective):
    """Raise `InputError` where the loss of the other objective is set, which nothing would read."""
    unread = "mlm_loss" if objective == CAUSAL_LM else "lm_loss"
    default = next(field.default for field in dataclasses.fields(config) if field.name == unread)
    if getattr(config, unread) != default:
        raise InputError(
            f"`{unread}` must not be given for objective={objective}. Received: {getattr(config, unread)}."
        )


def check_records(config, name, packs):
    """Raise `InputError` where the records that a flag names are not for the objective."""
    # The arrays of another form would be missing in the first batch, without the flag's name
    if packs.files and packs.spec.objective != FORMS[config.objective]:
        raise InputError(
            f"`{name}` must hold records for objective={config.objective}. Received: {packs.files[0]}, for "
            f"{packs.spec.objective}."
        )
    # Such records have the arrays of next sentences all the same, filled with a constant
    made_for_mlm = any(manifest.get("objective") == MLM for manifest in packs.manifests)
    if config.objective == MLM_NSP and made_for_mlm:
        raise InputError(
            f"`{name}` must hold next-sentence labels for objective={MLM_NSP}. Received: {packs.files[0]}, "
            f"made by --objective={MLM}."
        )
