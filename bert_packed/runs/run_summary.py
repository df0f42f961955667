"""Summaries of a run for people, and the cost of a step before it is compiled."""

import sys
import time

from keras import ops

from bert_packed.architectures.registry import ablations, family_of
from bert_packed.core.progress import count_of, describe_duration
from bert_packed.training.backend import compiled

LONG_STEP_SECONDS = 30
MATMUL_SIZE, LARGEST_MATMUL = 1024, 8192
LEAST_MATMUL_SECONDS = 2e-3
# Real steps of bert-tiny to bert-base took this much more than their matrix products: element-wise work,
# softmax and the update come on top
OVERHEAD = 1.5


def describe_run(config, model_config, data, attention):
    """Model, attention, data and step of a run, with the sequences to expect in a step: lines of text."""
    spec, factor = data.train.spec, data.train.packing_factor
    sequences = "an unknown number of sequences, since no manifest.json is beside the records"
    if factor:
        sequences = f"about {factor * config.train_batch_size:.1f} sequences (packing factor {factor:.3f})"
    predictions = ""
    if spec.max_predictions_per_pack:
        predictions = f" and {count_of(spec.max_predictions_per_pack, 'prediction')}"
    lines = [
        f"batch      {count_of(config.train_batch_size, 'pack')} a step (train_batch_size), "
        f"{config.packs_at_once} at once: {sequences}",
        f"model      {config.bert_config_file}: {count_of(model_config.num_hidden_layers, 'layer')} of "
        f"width {model_config.hidden_size}, vocabulary {model_config.vocab_size:,}",
        f"attention  {attention}",
        f"precision  {config.dtype}",
        f"data       {count_of(data.num_packs, 'pack')} of {spec.max_seq_length} tokens, up to "
        f"{count_of(spec.max_sequences_per_pack, 'sequence')}{predictions} each",
        f"vocabulary {data.vocabulary.path if data.vocabulary else 'not found; --vocab_file names it'}",
    ]
    if broken := ", ".join(ablations(model_config)):
        lines.insert(1, f"ABLATION   {broken}: PACKING IS BROKEN ON PURPOSE IN THIS RUN")
    if config.batch_warmup_steps:
        lines.append(
            f"grows      from {count_of(config.initial_batch_size, 'pack')} in the first step, over "
            f"{count_of(config.batch_warmup_steps, 'step')}"
        )
    if data.masking:
        lines.append(f"masks      drawn again in every epoch, of {data.masking.vocab_size:,} tokens")
    if config.do_eval and config.eval_input_file == config.input_file:
        lines.append(
            "evaluates  the training packs, since no eval_input_file is given: at most "
            f"{config.max_eval_steps} batches of {config.eval_batch_size}"
        )
    return "\n".join(lines)


def describe_cost(config, model_config, model_flops, data, flops_per_second):
    """Cost of a full step on this machine, and ways to make it smaller where it is long: lines of text."""
    seconds = estimate_step_seconds(model_flops, data.train.spec, config.train_batch_size, flops_per_second)
    full_steps = config.num_train_steps
    if config.growth:
        full_steps = config.growth.packs_before(config.num_train_steps) / config.train_batch_size
    lines = [
        f"cost       about {describe_duration(seconds)} a step on this machine, about "
        f"{describe_duration(seconds * full_steps)} for "
        f"{count_of(config.num_train_steps, 'step')}, and half a minute or more to compile"
    ]
    # A user's first run looks as if it hung in such a step
    if seconds > LONG_STEP_SECONDS:
        sizes = list(family_of(model_config).sizes)[:3]
        lines.append(
            f"           to shrink a step: --bert_config_file={'|'.join(sizes)}, "
            "--train_batch_size; against memory: --micro_batch_size; to shrink the run: --num_train_steps "
            "with --num_warmup_steps"
        )
    if config.num_warmup_steps >= config.num_train_steps:
        share = config.num_train_steps / config.num_warmup_steps
        lines.append(
            f"warm-up    is as long as the run: the learning rate ends at {share:.0%} of its peak; "
            "shorten it with --num_warmup_steps"
        )
    return "\n".join(lines)


def estimate_step_seconds(model_flops, spec, batch_size, flops_per_second):
    """Rough seconds per step over full packs: for a BERT within a factor of two, on CPUs."""
    # A Mamba takes longer: most of its time goes into the scan, which is no matrix product
    num_tokens = batch_size * spec.max_seq_length
    sums = {
        "num_tokens": num_tokens,
        # Attention computes its two products of scores in full: the mask does not save them
        "num_pairs": num_tokens * spec.max_seq_length,
        "num_predictions": batch_size * (spec.max_predictions_per_pack or spec.max_seq_length),
        "num_sequences": 0,
    }
    return OVERHEAD * model_flops(sums) / flops_per_second


def measured_flops_per_second(repeats=10, dtype="float32"):
    """This machine's rate at a compiled matrix product of "float32" or "bfloat16": the best of `repeats`."""
    # The best counts, as other programs slow some of these milliseconds down, but not a whole run. The side
    # grows from 1024 by doubling: on a small product an accelerator would spend less than on being called
    product = compiled(lambda a: ops.matmul(a, a))
    size = MATMUL_SIZE
    while True:
        matrix = ops.full((size, size), 1e-3, dtype)
        # This call compiles, so it is not timed
        _wait(product(matrix))
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            _wait(product(matrix))
            seconds.append(time.perf_counter() - start)
        if min(seconds) >= LEAST_MATMUL_SECONDS or size >= LARGEST_MATMUL:
            return 2 * size**3 / min(seconds)
        size *= 2


def _wait(matrix):
    """Wait until a device has computed a matrix, of which one element is fetched."""
    # `convert_to_numpy` fails on a bfloat16 of TensorFlow
    return float(matrix[0, 0])


def describe_counts(counts):
    """A line of warning for each of `counts`, a dict from what was left out or cut to how often."""
    return "".join(f"\n  warning: {number:,} {what}" for what, number in counts.items() if number)


def tell_skipped(step, why, sources=None):
    """Print that a step was left out, its figures that were not finite and its records: a line on stderr.

    `sources` is a dict from file to the numbers of the records that are its packs; None where unknown.
    """
    packs = "; ".join(f"{file} {', '.join(map(str, numbers))}" for file, numbers in (sources or {}).items())
    packs = f"; its records: {packs}" if packs else ""
    print(f"step {step} is left out, the weights stay: {why}{packs}", file=sys.stderr, flush=True)


def show_line(line):
    """Print a line of the training log where no progress bar shows it: in a batch job's file."""
    if not sys.stderr.isatty():
        print(line, flush=True)
