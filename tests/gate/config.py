"""Its config."""

import dataclasses

from bert_packed.architectures.base_config import BaseConfig
from bert_packed.core.settings import check_settings, setting


@dataclasses.dataclass(frozen=True)
class GateConfig(BaseConfig):
    vocab_size: int = setting(31, "tokens in the vocabulary", minimum=1)
    hidden_size: int = setting(16, "width of every layer", minimum=1)
    num_hidden_layers: int = setting(1, "blocks", minimum=1)

    without_attention = "tokens see the mean of their sequence"

    def __post_init__(self):
        check_settings(self)
