"""Time that a part of packing adds: the attention mask, fresh masks of tokens, the restarts of a Mamba.

    python -m benchmarks.overhead --of=attention_mask --bert_config_file=bert-base
    python -m benchmarks.overhead --of=fresh_masks --input_file='sample_data/packed_512/train/*.tfrecord'
    python -m benchmarks.overhead --of=restarts --bert_config_file=mamba-tiny

Legend: B packs per batch, S pack length, D model width, N heads, H head width.
"""

import dataclasses
import statistics
import sys
import tempfile

import numpy as np

from benchmarks.results import Settings, show
from benchmarks.synthetic_data import spec_of, token_batch, wikipedia_corpus
from benchmarks.timing import added_row
from benchmarks.training_steps import build_engine, first_head, stepping
from bert_packed.architectures.registry import load_model_config
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, check_divides, setting
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.engines import choose_backend

PARTS = ATTENTION_MASK, FRESH_MASKS, RESTARTS = "attention_mask", "fresh_masks", "restarts"
WITH, WITHOUT = "with", "without"
STEP = "training step"
MOST = 2.0  # percent of a training step, wanted
DEPTH = 3  # sequences in a pack of random tokens, as in the papers
MAMBA_VOCABULARY = 1024  # of a size: logits of a large one would hide the states
SHARES = (0.5, 0.3, 0.15)  # of a pack that sequences fill for the attention mask; the rest is padding


@dataclasses.dataclass(frozen=True)
class OverheadConfig(Settings):
    """Interleaves the same work with and without one part of packing, and prints what the part adds, in
    percent: the median of neighboring times; `from` and `to` are its interval of 95 %.

    attention_mask  the mask that keeps sequences apart, in one attention layer, against no mask at all
    fresh_masks     --masking=dynamic in a step of pre-training, against the masks of the records: the same packs
                    in the same order, and one compiled step
    restarts        states and convolutions of a Mamba that restart with each sequence: a training step, and the
                    operators, against programs without restarts
    """

    of: str = setting(ATTENTION_MASK, "part of packing", choices=PARTS)
    bert_config_file: str = setting("bert-mini", "size, or config file, of the BERT or Mamba")
    batch_size: int = setting(4, "packs a step", minimum=1)
    micro_batch_size: int = setting(
        0, "packs computed at once; 0 = all of the step's", minimum=0, only_with=f"of={FRESH_MASKS}"
    )
    max_seq_length: int = setting(
        512, "tokens per pack", minimum=16, only_with=f"of={ATTENTION_MASK},{RESTARTS}"
    )
    input_file: str = setting(
        "", "packed training TFRecords: comma-separated paths or globs", only_with=f"of={FRESH_MASKS}"
    )
    vocab_file: str = setting(
        "", "their vocabulary; empty = as run_pretraining.py finds it", only_with=f"of={FRESH_MASKS}"
    )
    objective: str = setting(
        "mlm_nsp", "what is learned", choices=("mlm_nsp", "mlm"), only_with=f"of={FRESH_MASKS}"
    )
    repeats: int = setting(41, "timed calls of each", minimum=1)

    def __post_init__(self):
        super().__post_init__()
        check_divides(self, "micro_batch_size", "batch_size")
        if self.of == FRESH_MASKS and not self.input_file:
            raise InputError(f"`input_file` must be given with of={FRESH_MASKS}. Received: nothing.")


def main(config):
    """Measure, print and write."""
    choose_backend()
    with tempfile.TemporaryDirectory() as folder:
        if config.of == FRESH_MASKS:
            pairs = fresh_mask_pairs(config, folder)
        else:
            vocab_size = MAMBA_VOCABULARY if config.of == RESTARTS else None
            model_config = load_model_config(config.bert_config_file, vocab_size)
            if (first_head(model_config) == CAUSAL_LM) != (config.of == RESTARTS):
                raise InputError(
                    f"`bert_config_file` must be a {'Mamba' if config.of == RESTARTS else 'BERT'} with "
                    f"of={config.of}. Received: {config.bert_config_file}."
                )
            make = {ATTENTION_MASK: attention_mask_pairs, RESTARTS: restart_pairs}[config.of]
            pairs = make(model_config, config.batch_size, config.max_seq_length)
        rows = [overhead_row(name, time_interleaved(ways, config.repeats)) for name, ways in pairs.items()]
    show("overhead", config, {config.of: rows})


def overhead_row(name, seconds):
    """A row of the table, of seconds: a dict from `WITH` and `WITHOUT` to a list."""
    return {
        "of": name,
        **{f"{way}, s": statistics.median(seconds[way]) for way in (WITH, WITHOUT)},
        **added_row(seconds[WITH], seconds[WITHOUT]),
        "at most, %": MOST if name == STEP else None,
    }


def attention_mask_pairs(model_config, batch_size, length):
    """Programs of an attention layer: dict from pass to a dict from `WITH` and `WITHOUT` to a function."""
    inputs = attention_inputs(model_config, batch_size, length)
    pairs = {"forward": {}, "forward and backward": {}}
    for way in (WITH, WITHOUT):
        for name, program in attention_programs(model_config, way == WITH, *inputs).items():
            pairs[name][way] = program
    return pairs


def attention_inputs(model_config, batch_size, length):
    """Random hidden states float32 `[B, S, D]`; ids int32 `[B, S]` of three sequences and padding."""
    hidden_BSD = np.random.default_rng(0).normal(size=(batch_size, length, model_config.hidden_size))
    lengths = [int(share * length) for share in SHARES]
    lengths.append(length - sum(lengths))
    ids_S = np.repeat([*range(1, len(lengths)), 0], lengths).astype(np.int32)
    return hidden_BSD.astype(np.float32), np.tile(ids_S, (batch_size, 1))


def attention_programs(model_config, has_mask, hidden_BSD, sequence_ids_BS):
    """A layer forward, and the gradient of its input: dict from pass to a function that returns an array.

    The mask is made inside the program, as in the model. Without it, all tokens of a row attend to all.
    """
    import keras
    from keras import ops

    from bert_packed.architectures.bert.layers import SelfAttention
    from bert_packed.layers.context import PackContext
    from bert_packed.layers.cpu_gradients import attention_scores, gradients_for_cpus, weighted_values
    from bert_packed.parallel.targets import devices_here
    from bert_packed.training.backend import compiled, gradient

    def attend_to_all(query_BSNH, key_BSNH, value_BSNH, _):
        scores_BNSS = attention_scores(query_BSNH, key_BSNH)
        return weighted_values(ops.softmax(scores_BNSS, axis=-1), value_BSNH)

    config = dataclasses.replace(model_config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    keras.utils.set_random_seed(0)
    layer = SelfAttention(config, attend=None if has_mask else attend_to_all)
    layer.build(hidden_BSD.shape)
    weights_BSD = np.random.default_rng(1).normal(size=hidden_BSD.shape).astype(np.float32)

    def forward(hidden_BSD, ids_BS):
        with gradients_for_cpus(devices_here().platform == "cpu"):  # as in a training step
            return layer(hidden_BSD, context=PackContext(ids_BS, None))  # attention reads no positions

    def both(hidden_BSD, ids_BS):
        # Weighted, since layer norm makes a plain sum constant
        return gradient(lambda hidden: ops.sum(forward(hidden, ids_BS) * weights_BSD))(hidden_BSD)

    given = [ops.convert_to_tensor(values) for values in (hidden_BSD, sequence_ids_BS)]
    programs = {"forward": compiled(forward, layer), "forward and backward": compiled(both, layer)}
    return {
        name: lambda _, program=program: ops.convert_to_numpy(program(*given))
        for name, program in programs.items()
    }


def fresh_mask_pairs(config, folder):
    """Training steps on a run's batches under either masking; returns as `attention_mask_pairs`."""
    engine, batches = masked_batches(config, folder)

    def stepping(its_batches):
        return lambda _: float(engine.train_step(next(its_batches))["num_sequences"])  # wait for the device

    return {STEP: {way: stepping(its_batches) for way, its_batches in batches.items()}}


def masked_batches(config, folder):
    """A run's engine, and its endless batches: dict from `WITH` and `WITHOUT` fresh masks."""
    from bert_packed.runs.pretraining import Run
    from bert_packed.runs.run_batches import train_batches

    dynamic = PretrainingConfig(
        input_file=config.input_file,
        output_dir=folder,
        objective=config.objective,
        bert_config_file=config.bert_config_file,
        train_batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        masking="dynamic",
        vocab_file=config.vocab_file,
    )
    run = Run(dynamic)
    run.read_data()
    static = dataclasses.replace(run, data=dataclasses.replace(run.data, masking=None))
    return run.build_engine(), {WITH: train_batches(run), WITHOUT: train_batches(static)}


def restart_pairs(model_config, batch_size, length):
    """Training steps and operators of a Mamba; returns as `attention_mask_pairs`."""
    from benchmarks import mamba_operators

    rng = np.random.default_rng(0)
    packs = wikipedia_corpus(length, DEPTH).draw_packs(batch_size, rng)
    batch = token_batch(packs, spec_of(packs, length), model_config.vocab_size, rng)
    endless = dataclasses.replace(model_config, ablation_no_position_reset=True)
    configs = {WITH: model_config, WITHOUT: endless}
    pairs = {STEP: {way: stepping(build_engine(one), [batch]) for way, one in configs.items()}}
    for operator, plain in mamba_operators.OPERATORS.items():
        program = mamba_operators.operator_program(plain, mamba_operators.BOTH)
        given = mamba_operators.operator_inputs(operator, model_config, [batch])
        without = [(inputs, None, weights) for inputs, _, weights in given]
        pairs[f"{operator}, forward and backward"] = {
            WITH: mamba_operators.running(program, given),
            WITHOUT: mamba_operators.running(program, without),
        }
    return pairs


if __name__ == "__main__":
    sys.exit(run(main, OverheadConfig))
