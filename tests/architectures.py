"""A tiny model of each architecture, its objective, and the same sequences in packs and alone."""

import dataclasses
from collections.abc import Callable

import modern_bert_models
import next_tokens
import packs
import tiny

from bert_packed.architectures.base_config import BaseConfig
from bert_packed.architectures.registry import FAMILIES
from bert_packed.objectives.objective import Objective
from bert_packed.objectives.pretraining import (
    masked_lm_objective,
    next_token_objective,
    pretraining_objective,
)
from bert_packed.training import engines


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One row of the grids.

    Attributes:
        config: Two or three blocks without dropout.
        batches: Function to a packed and an unpacked batch.
        dropout: Names of the config's rates.
    """

    config: BaseConfig
    objective: Objective
    batches: Callable
    dropout: tuple = ()

    def with_dropout(self, rate):
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, **dict.fromkeys(self.dropout, rate))
        )

    def model(self, **build):
        return self.objective.build_model(self.config, 1, **build)

    def engine(self, build=None, **engine):
        return engines.make_engine(self.model(**(build or {})), self.objective, **engine)


MAMBA = next_token_objective("per_token"), next_tokens.packed_and_unpacked
ARCHITECTURES = {
    "bert": Architecture(
        tiny.CONFIG,
        pretraining_objective("per_sequence"),
        packs.packed_and_unpacked,
        ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
    "modernbert": Architecture(
        modern_bert_models.CONFIG,
        masked_lm_objective("per_token"),
        packs.packed_and_unpacked,
        ("embedding_dropout", "attention_dropout", "mlp_dropout"),
    ),
    "mamba": Architecture(next_tokens.CONFIG, *MAMBA),
    "mamba2": Architecture(next_tokens.MAMBA2, *MAMBA),
}
assert ARCHITECTURES.keys() == FAMILIES.keys()
