"""Config of a Mamba, in Hugging Face's names, and what that of a Mamba-2 shares."""

import dataclasses

from bert_packed.architectures.base_config import MOST_BLOCKS, BaseConfig, real, size
from bert_packed.core.settings import InputError, check_settings, setting


@dataclasses.dataclass(frozen=True)
class StateSpaceConfig(BaseConfig):
    """Base of Mamba's and Mamba-2's configs. Sequences may have any length, and there is no dropout.

    Attributes:
        inner_size: E, channels of the scan.
        conv_size: Channels of the convolution.
    """

    vocab_size: int = size(50280, "tokens in the vocabulary")
    hidden_size: int = size(768, "width of every layer")
    num_hidden_layers: int = size(32, "Mamba blocks", maximum=MOST_BLOCKS)
    state_size: int = size(16, "states of a channel")
    expand: int = size(2, "inner width, of the width")
    conv_kernel: int = size(4, "taps of the convolution", minimum=2, maximum=1024)
    use_bias: bool = setting(False, "biases of the input and output projections")
    use_conv_bias: bool = setting(True, "bias of the convolution")
    initializer_range: float = real(0.02, "standard deviation of initial embeddings")
    layer_norm_epsilon: float = real(1e-5, "epsilon of the norms")
    time_step_min: float = real(0.001, "least initial step size", minimum=1e-9)
    time_step_max: float = real(0.1, "largest initial step size", minimum=1e-9)
    time_step_floor: float = real(1e-4, "no initial step size is below it", minimum=1e-9)
    ablation_no_position_reset: bool = setting(False, "states and convolution go on through the pack")

    without_attention = "states go from token to token"
    training_fields = (*BaseConfig.training_fields, "time_step_min", "time_step_max", "time_step_floor")
    fixed = (*BaseConfig.fixed, ("hidden_act", "silu"), ("residual_in_fp32", True))
    chunk_size = 32  # docs/guides/mamba.md has the measurements

    def __post_init__(self):
        check_settings(self)
        if self.time_step_min > self.time_step_max:
            raise InputError(
                "`time_step_min` must be at most time_step_max. Received: "
                f"time_step_min={self.time_step_min}, time_step_max={self.time_step_max}."
            )

    @property
    def inner_size(self):
        return self.expand * self.hidden_size

    conv_size = inner_size


@dataclasses.dataclass(frozen=True)
class MambaConfig(StateSpaceConfig):
    """The fields of a Mamba's `config.json`."""

    time_step_rank: int = size(0, "rank of the step sizes; 0 = hidden_size / 16, rounded up", minimum=0)

    # The rank shows in shapes, and 0 stands for the number that it means
    training_fields = (*StateSpaceConfig.training_fields, "time_step_rank")
    tie_word_embeddings = True
    kernels = ("convolve", "scan")
    fixed = (*StateSpaceConfig.fixed, ("tie_word_embeddings", True))

    @property
    def step_rank(self):
        """L, rank of the step sizes."""
        return self.time_step_rank or -(-self.hidden_size // 16)

    @property
    def block_weights(self):
        return self.inner_size * (3 * self.hidden_size + 2 * self.step_rank + 2 * self.state_size)

    @classmethod
    def from_json(cls, path, content):
        rank = content.get("time_step_rank", 0)
        config = super().from_json(path, {**content, "time_step_rank": 0 if rank == "auto" else rank})
        inner = content.get("intermediate_size")
        if inner not in (None, config.inner_size):
            raise InputError(
                f"{path}: intermediate_size must be expand times hidden_size, {config.inner_size}. "
                f"Received: {inner}."
            )
        return config


# "PackMamba", Section 4, has the large sizes; the tiny ones are ours
SIZES = {
    "mamba-tiny": MambaConfig(num_hidden_layers=2, hidden_size=128),
    "mamba-mini": MambaConfig(num_hidden_layers=4, hidden_size=256),
    "mamba-110m": MambaConfig(num_hidden_layers=16, hidden_size=1024),
    "mamba-1.4b": MambaConfig(num_hidden_layers=48, hidden_size=2048),
    "mamba-2.8b": MambaConfig(num_hidden_layers=64, hidden_size=2560),
}
UNDECAYED = ("bias", "A_log")  # as by Mamba's authors
