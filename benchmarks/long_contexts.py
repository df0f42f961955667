"""Training steps of a ModernBERT by the length of its packs, against dense blocks and against transformers.

python -m benchmarks.long_contexts --reference
"""

import contextlib
import dataclasses
import functools
import os
import statistics
import subprocess
import sys
import tempfile

import numpy as np

from benchmarks.results import Settings, show
from benchmarks.synthetic_data import check_positions, wikipedia_corpus
from benchmarks.timing import median_row, ratios
from benchmarks.training_steps import build_engine, device_options, stepping
from bert_packed.architectures.registry import FAMILIES, MIXED, load_model_config
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, as_text, setting
from bert_packed.core.storage import read_json
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.training.engines import choose_backend

NUM_BATCHES = 2  # of each way
PACKED, GLOBAL = "packed", "packed, every block global"
PADDED, ONE_BY_ONE = "transformers, padded", "transformers, one by one"


def _parse_lengths(text):
    if not all(one.isdecimal() and int(one) >= 16 for one in text.split(",")):
        raise ValueError("lengths of at least 16, with commas")
    return text


@dataclasses.dataclass(frozen=True)
class LengthsConfig(Settings):
    """A step has --tokens_per_step tokens in packs, padding included: packs of Wikipedia's lengths in
    proportion to the pack, at most three sequences each. Local blocks compute bands; the same model with
    every block global shows what they save. With --reference also transformers (SDPA) on the same
    sequences, one after another, and in padded batches of as many rows as there are packs, where these
    are several. Gradients of a step add up. Each length has a process to itself.

    A speed-up is the median ratio of a way's step to the packed step beside it; `from` and `to` are its
    interval of 95 %. Dropout is on.
    """

    bert_config_file: str = setting("modernbert-mini", "size, or config.json, of a ModernBERT")
    max_seq_lengths: str = setting(
        "512,2048,8192", "tokens of a pack and of a row, with commas", parse=_parse_lengths
    )
    tokens_per_step: int = setting(8192, "tokens, padding included, of a step", minimum=16)
    longest_global: int = setting(
        2048,
        "longest packs that are also measured with every block global; six of 8,192 take over 20 GB",
        minimum=0,
    )
    repeats: int = setting(7, "timed steps of each way", minimum=1)
    reference: bool = setting(False, "also measure transformers on torch (extra `reference`)")

    def __post_init__(self):
        super().__post_init__()
        longest = max(self.lengths)
        if self.tokens_per_step < longest:
            raise InputError(
                f"`tokens_per_step` must be at least a row, {longest}. Received: {self.tokens_per_step}."
            )

    @property
    def lengths(self):
        """Tokens of a pack: list of int."""
        return [int(one) for one in self.max_seq_lengths.split(",")]


def main(config):
    """Measure, print and write."""
    choose_backend()
    model_config = load_model_config(config.bert_config_file)
    if not isinstance(model_config, FAMILIES["modernbert"].config_class):
        raise InputError(f"`bert_config_file` must be of a ModernBERT. Received: {config.bert_config_file}.")
    for length in config.lengths:
        check_positions(length, model_config)
    if len(config.lengths) > 1:
        rows = [row for length in config.lengths for row in rows_of_process(config, length)]
    else:
        rows = rows_of_length(config, model_config, *config.lengths)
    show("long_contexts", config, {"steps": rows})


def rows_of_process(config, length):
    """The rows of one length by this command in another process, which gives its memory back."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "length.json")
        flags = {**dataclasses.asdict(config), "max_seq_lengths": length, "json": path}
        command = [sys.executable, "-m", "benchmarks.long_contexts"]
        given = [f"--{name}={as_text(value)}" for name, value in flags.items()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        status = subprocess.run([*command, *given], env=environment).returncode
        if status:
            raise InputError(
                f"`max_seq_lengths` must fit this machine. Received: {length}: exit status {status}."
            )
        return read_json(path)["tables"]["steps"]


def rows_of_length(config, model_config, length):
    """Steps of all ways on packs of a length: rows of a table."""
    corpus, rng = wikipedia_corpus(length), np.random.default_rng(0)
    size = config.tokens_per_step // length
    packs = [corpus.packed_batch(size, model_config.vocab_size, rng) for _ in range(NUM_BATCHES)]
    all_global = dataclasses.replace(model_config, global_attn_every_n_layers=1)
    options = device_options(model_config, length)
    with contextlib.ExitStack() as stack:
        ways = {PACKED: stepping(build_engine(model_config, **options), packs)}
        if length <= config.longest_global:
            ways[GLOBAL] = stepping(build_engine(all_global, **options), packs)
        if config.reference:
            ways |= peer_ways(model_config, packs, options["dtype"] == MIXED, stack)
        seconds = time_interleaved(ways, config.repeats)
    num_tokens = statistics.fmean(np.count_nonzero(batch["sequence_ids"]) for batch in packs)
    return [
        {
            "tokens of a pack": length,
            "way": way,
            "s/step": statistics.median(times),
            "real tokens/s": num_tokens / statistics.median(times),
            **median_row("packed is faster by", ratios(times, seconds[PACKED])),
        }
        for way, times in seconds.items()
    ]


def peer_ways(model_config, packs, is_mixed, stack):
    """Functions of the repeat that take a step of transformers, by name, until the stack ends."""
    from benchmarks.peers.training import transformers_training

    num_packs = len(packs[0]["token_ids"])
    # All sequences in one batch would take several times the memory of the packs
    sizes = {ONE_BY_ONE: 1} | ({PADDED: num_packs} if num_packs > 1 else {})
    rows = {way: [rows_of(batch, size) for batch in packs] for way, size in sizes.items()}
    peer = stack.enter_context(
        transformers_training(model_config, rows, keeps_memory=True, is_mixed=is_mixed)
    )
    return {way: functools.partial(peer.call, "step", way) for way in rows}


def rows_of(batch, size):
    """The sequences of packs, one a row, in batch dicts of at most `size` rows: list of dicts."""
    from bert_packed.evaluation.contamination import unpack_batch

    unpacked, slots = unpack_batch(batch)
    return [
        {name: values[first : first + size] for name, values in unpacked.items()}
        for first in range(0, len(slots), size)
    ]


if __name__ == "__main__":
    sys.exit(run(main, LengthsConfig))
