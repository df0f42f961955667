"""Config of a Mamba-2, in Hugging Face's names."""

import dataclasses

from bert_packed.architectures.base_config import LARGEST_FLOAT32, MOST_BLOCKS, BaseConfig, real, size
from bert_packed.architectures.mamba.config import StateSpaceConfig
from bert_packed.core.settings import InputError, setting


@dataclasses.dataclass(frozen=True)
class Mamba2Config(StateSpaceConfig):
    """The fields of a Mamba-2's `config.json`, with mamba2-130m as default."""

    vocab_size: int = size(50288, "tokens in the vocabulary")
    num_hidden_layers: int = size(24, "Mamba blocks", maximum=MOST_BLOCKS)
    state_size: int = size(128, "states of a channel")
    head_dim: int = size(64, "channels of a head, which decay alike")
    n_groups: int = size(1, "groups of heads, each with its own B, C and norm")
    chunk_size: int = size(256, "tokens of a chunk of the scan, off TPUs; changes speed alone")
    time_step_limit_min: float = real(0.0, "no step size is below it")
    time_step_limit_max: float = real(0.0, "no step size is above it; 0 = no limit")
    tie_word_embeddings: bool = setting(True, "the output matrix is the token embeddings")

    # transformers has other defaults
    shape_fields = (*BaseConfig.shape_fields, "state_size", "head_dim", "n_groups")
    training_fields = (*StateSpaceConfig.training_fields, "chunk_size")
    kernels = ("convolve", "duality")
    # A Mamba-2 of `mamba_ssm` may have no norm behind its scan, one before the gate, or blocks that attend
    fixed = (*StateSpaceConfig.fixed, ("rms_norm", True), ("norm_before_gate", False), ("attn_layer_idx", []))

    def __post_init__(self):
        super().__post_init__()
        if self.inner_size % self.head_dim or self.num_heads % self.n_groups:
            raise InputError(
                "`head_dim` must divide expand times hidden_size, and `n_groups` the heads. Received: "
                f"head_dim={self.head_dim}, n_groups={self.n_groups} for {self.inner_size}."
            )
        if 0 < self.time_step_limit_max < self.time_step_limit_min:
            raise InputError(
                "`time_step_limit_min` must be at most time_step_limit_max. Received: "
                f"{self.time_step_limit_min} and {self.time_step_limit_max}."
            )

    @property
    def num_heads(self):
        """N, heads of the scan."""
        return self.inner_size // self.head_dim

    @property
    def group_size(self):
        """Channels of B, and of C, of all groups."""
        return self.n_groups * self.state_size

    @property
    def conv_size(self):
        return self.inner_size + 2 * self.group_size

    @property
    def block_weights(self):
        return self.hidden_size * (2 * self.inner_size + self.conv_size + self.num_heads)

    @classmethod
    def from_json(cls, path, content):
        if "time_step_limit" in content:
            given = content["time_step_limit"]
            try:  # transformers 5 writes {"__float__": "Infinity"}
                least, most = (float(v["__float__"] if isinstance(v, dict) else v) for v in given)
                if not most > 0:  # 0 is no limit in `time_step_limit_max`
                    raise ValueError("a largest step of 0")
            except (TypeError, ValueError, KeyError, OverflowError) as error:
                raise InputError(
                    f"{path}: time_step_limit must be two numbers, the second above 0. Received: "
                    f"{given!r:.100}."
                ) from error
            most = most if most < LARGEST_FLOAT32 else 0.0
            content = {**content, "time_step_limit_min": least, "time_step_limit_max": most}
        config = super().from_json(path, content)
        if content.get("num_heads", config.num_heads) != config.num_heads:
            raise InputError(
                f"{path}: num_heads must be expand times hidden_size / head_dim, {config.num_heads}. "
                f"Received: {content['num_heads']}."
            )
        return config


def _size(num_hidden_layers, hidden_size, **changes):
    return Mamba2Config(num_hidden_layers=num_hidden_layers, hidden_size=hidden_size, **changes)


# Dao and Gu 2024, of their repository; the tiny ones are ours, with chunks for CPUs
SIZES = {
    "mamba2-tiny": _size(2, 128, state_size=64, chunk_size=64),
    "mamba2-mini": _size(4, 256, state_size=64, chunk_size=64),
    "mamba2-130m": _size(24, 768),
    "mamba2-370m": _size(48, 1024),
    "mamba2-780m": _size(48, 1536),
    "mamba2-1.3b": _size(48, 2048),
    "mamba2-2.7b": _size(64, 2560),
}
