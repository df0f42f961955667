"""Command line: what the block-diagonal mask costs one attention layer, forward and backward.

Legend: B packs per batch, S pack length, D model width, N heads, H head width.
"""

import dataclasses
import functools
import statistics
import sys
import time

import numpy as np

from bert_packed.config import MODEL_SIZES
from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import InputError, check_settings, setting
from bert_packed.training.engines import choose_backend

# Shares of a pack that its sequences fill; the rest is padding
SEQUENCE_SHARES = (0.5, 0.3, 0.15)
DESCRIPTION = """
Measures one attention layer with and without the mask that keeps sequences apart: forward, and forward with
backward, one compiled program each. The programs run in turns; the table has the medians.

Measures the backend that KERAS_BACKEND names: tensorflow, or jax.
"""


@dataclasses.dataclass(frozen=True)
class CostConfig:
    """Every flag of the command."""

    models: str = setting("bert-mini,bert-base", f"comma-separated sizes: {', '.join(MODEL_SIZES)}")
    batch_size: int = setting(4, "packs", minimum=1)
    max_seq_length: int = setting(512, "tokens per pack", minimum=8)
    repeats: int = setting(30, "timed calls of each program", minimum=1)
    json: str = setting("", "also write the table to this file")

    def __post_init__(self):
        check_settings(self)
        for name in self.models.split(","):
            if name not in MODEL_SIZES:
                raise InputError(
                    f"`models` must be of {', '.join(MODEL_SIZES)}. Received: {name!r} in {self.models!r}."
                )


def main(config):
    """Measure and print."""
    backend = choose_backend()
    rows = [
        {"backend": backend, "model": name, **row}
        for name in config.models.split(",")
        for row in measure(MODEL_SIZES[name], config.batch_size, config.max_seq_length, config.repeats)
    ]
    print_table(rows, config.json)


def measure(model_config, batch_size, max_seq_length, repeats):
    """Time one attention layer with and without the mask.

    Returns:
        List of dicts for a table: `pass` (forward, or both), `with_mask_ms`, `without_ms` (medians),
        `mask_ms` (median of the differences, turn by turn), `mask_percent` of the time without.
    """
    inputs = make_inputs(model_config, batch_size, max_seq_length)
    programs = make_programs(model_config, *inputs)
    for program in programs.values():
        program()  # compile
    seconds = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            program()
            seconds[name].append(time.perf_counter() - start)
    rows = []
    for name in ("forward", "both"):
        masked, plain = (seconds[name, has_mask] for has_mask in (True, False))
        differences = [one - other for one, other in zip(masked, plain, strict=True)]
        rows.append(
            {
                "pass": name,
                "with_mask_ms": 1e3 * statistics.median(masked),
                "without_ms": 1e3 * statistics.median(plain),
                "mask_ms": 1e3 * statistics.median(differences),
                "mask_percent": 100 * statistics.median(differences) / statistics.median(plain),
            }
        )
    return rows


def make_inputs(model_config, batch_size, max_seq_length):
    """Random hidden states float32 `[B, S, D]`; ids int32 `[B, S]` of three sequences and padding."""
    rng = np.random.default_rng(0)
    hidden_BSD = rng.normal(size=(batch_size, max_seq_length, model_config.hidden_size))
    lengths = [int(share * max_seq_length) for share in SEQUENCE_SHARES]
    lengths.append(max_seq_length - sum(lengths))
    ids_S = np.repeat([*range(1, len(lengths)), 0], lengths).astype(np.int32)
    return hidden_BSD.astype(np.float32), np.tile(ids_S, (batch_size, 1))


def make_programs(model_config, hidden_BSD, sequence_ids_BS):
    """The four programs, each a function without arguments that returns when its result is there.

    The mask is made inside the program, as in the model. Without it, all tokens of a row attend to all.

    Returns:
        Dict from (pass, whether it has the mask) to function, which returns a NumPy array.
    """
    # Keras: not for --help
    import keras
    from keras import ops

    from bert_packed.models.attention_products import attention_scores, weighted_values
    from bert_packed.models.context import PackContext
    from bert_packed.models.cpu_forms import gradients_for_cpus
    from bert_packed.models.layers import SelfAttention
    from bert_packed.training.engines.functional import compiled, gradient

    config = dataclasses.replace(model_config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

    def attend_to_all(query_BSNH, key_BSNH, value_BSNH, _):
        scores_BNSS = attention_scores(query_BSNH, key_BSNH)
        return weighted_values(ops.softmax(scores_BNSS, axis=-1), value_BSNH)

    weights_BSD = np.random.default_rng(1).normal(size=hidden_BSD.shape).astype(np.float32)
    programs = {}
    for has_mask in (True, False):
        keras.utils.set_random_seed(0)
        layer = SelfAttention(config, attend=None if has_mask else attend_to_all)
        layer.build(hidden_BSD.shape)

        def forward(hidden_BSD, ids_BS, layer=layer):
            with gradients_for_cpus():  # as in a training step
                return layer(hidden_BSD, context=PackContext(ids_BS, None))  # attention reads no positions

        def both(hidden_BSD, ids_BS, forward=forward):
            # Weighted, since layer norm makes a plain sum constant
            return gradient(lambda hidden: ops.sum(forward(hidden, ids_BS) * weights_BSD))(hidden_BSD)

        for name, function in (("forward", forward), ("both", both)):
            program = compiled(function, layer)
            arguments = [ops.convert_to_tensor(values) for values in (hidden_BSD, sequence_ids_BS)]
            programs[name, has_mask] = functools.partial(_run, program, arguments)
    return programs


def _run(program, arguments):
    from keras import ops

    return ops.convert_to_numpy(program(*arguments))


if __name__ == "__main__":
    sys.exit(run(main, CostConfig, DESCRIPTION))
