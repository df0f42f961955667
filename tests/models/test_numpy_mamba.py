"""Logits of packs equal a Mamba in NumPy, token by token, on one sequence at a time without padding.

Legend: D model width, E inner width, Z states of a channel.
"""

import dataclasses

import numpy as np
import pytest
from next_tokens import CONFIG, packed_and_unpacked
from scipy.special import expit

from bert_packed.architectures.packed_model import build_model
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends


class NumpyMamba:
    """Section 3 of "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", in float64.

    Args:
        model: Ours, which gets random weights: a scale of 1 would hide that it is left out.
    """

    def __init__(self, model):
        rng, self.weights, self.config = np.random.default_rng(0), {}, model.config
        for name, weight in named_weights(model).items():
            middle = 1.0 if name.endswith(("scale", "mixer/D")) else 0.0
            weight.assign(rng.normal(middle, 0.3, weight.shape))
            self.weights[name] = weight.numpy().astype(np.float64)

    def dense(self, name, x):
        return x @ self.weights[f"{name}/kernel"] + self.weights.get(f"{name}/bias", 0.0)

    def norm(self, name, x):
        return (
            x
            / np.sqrt((x**2).mean() + self.config.layer_norm_epsilon)
            * self.weights[f"{name}/RMSNorm/scale"]
        )

    def mix(self, name, tokens_D):
        """A block's mixer of the tokens of a sequence, one after the other."""
        config, rank = self.config, self.config.step_rank
        taps_WE, bias = self.weights[f"{name}/conv1d_kernel"], self.weights.get(f"{name}/conv1d_bias", 0.0)
        a_EZ = -np.exp(self.weights[f"{name}/A_log"])
        inners_E, state_EZ, mixed_D = [], np.zeros(a_EZ.shape), []
        for token_D in tokens_D:
            inner_E, gate_E = np.split(self.dense(f"{name}/in_proj", token_D), 2)
            inners_E.append(inner_E)
            recent = inners_E[-config.conv_kernel :]
            x_E = silu(
                sum(tap * one for tap, one in zip(taps_WE[-len(recent) :], recent, strict=True)) + bias
            )
            low, b_Z, c_Z = np.split(self.dense(f"{name}/x_proj", x_E), [rank, rank + config.state_size])
            size_E = np.log1p(np.exp(self.dense(f"{name}/dt_proj", low)))
            state_EZ = np.exp(size_E[:, None] * a_EZ) * state_EZ + (size_E * x_E)[:, None] * b_Z
            y_E = state_EZ @ c_Z + self.weights[f"{name}/D"] * x_E
            mixed_D.append(self.dense(f"{name}/out_proj", y_E * silu(gate_E)))
        return mixed_D

    def logits(self, token_ids):
        table_VD = self.weights["backbone/embeddings"]
        hidden = list(table_VD[token_ids])
        for layer in range(self.config.num_hidden_layers):
            name = f"backbone/layers_{layer}"
            mixed = self.mix(f"{name}/mixer", [self.norm(name, token_D) for token_D in hidden])
            hidden = [token_D + change_D for token_D, change_D in zip(hidden, mixed, strict=True)]
        return np.stack([self.norm("backbone", token_D) for token_D in hidden]) @ table_VD.T


def silu(x):
    return x * expit(x)


@pytest.mark.parametrize(
    "changes", [{}, {"use_bias": True, "layer_norm_epsilon": 0.1}, {"use_conv_bias": False, "conv_kernel": 2}]
)
def test_logits_are_those_of_the_sequence_alone(changes):
    batch, _ = packed_and_unpacked()
    model = build_model(CAUSAL_LM, dataclasses.replace(CONFIG, **changes), 1)
    plain, logits = NumpyMamba(model), np.asarray(model(batch)["logits"])
    sequences = np.argwhere(batch["slot_weights"])
    for row, slot in sequences:
        mine = batch["sequence_ids"][row] == slot + 1
        want = plain.logits(batch["token_ids"][row, mine])
        np.testing.assert_allclose(logits[row, mine], want, atol=2e-5 * np.abs(want).max())
    assert len(sequences) == 11
