"""Each part of the report on Mambas: which sequences it takes, and the tables that it makes of them."""

import functools

import numpy as np

from benchmarks import mamba_operators, mamba_speed, reset_cost
from benchmarks.padding_rates import LONGEST, draw_lengths, padding_rates
from benchmarks.sequence_batches import PACKED, choose_packs, make_batches
from bert_packed.core.settings import InputError
from bert_packed.models.selective_scan import CHUNK_LENGTH
from bert_packed.records.read_lengths import read_histogram

ALL_LENGTHS = 20_000  # sequences of which padding rates are told


def read_lengths(config):
    """Lengths of all sequences, int64 `[n]`: of the records, or drawn and shrunk to the rows.

    Args:
        config: `packmamba.PackMambaConfig`.

    Raises:
        InputError: a sequence of the records is longer than a row.
    """
    if not config.input_file:
        drawn = draw_lengths(ALL_LENGTHS, config.random_seed)
        return np.maximum(1, drawn * config.max_seq_length // LONGEST)
    counts = read_histogram("", config.input_file)
    if len(counts) > config.max_seq_length:
        raise InputError(
            f"`max_seq_length` must be at least {len(counts)}, the longest sequence of {config.input_file}. "
            f"Received: {config.max_seq_length}."
        )
    return np.repeat(np.arange(1, len(counts) + 1), counts)


class Measurements:
    """The parts of the report, measured when they are asked for.

    Args:
        config: `packmamba.PackMambaConfig`.
        model_config: `MambaConfig`.
        lengths: From `read_lengths`.
    """

    def __init__(self, config, model_config, lengths):
        self.config = config
        self.model_config = model_config
        self.lengths = lengths
        self.row_length = config.max_seq_length // config.shrink
        self.pack_length = config.pack_length // config.shrink

    def describe(self):
        """What is timed: a line of text."""
        return (
            f"timed: {self.config.bert_config_file}, rows of {self.row_length} tokens, steps of "
            f"{self.config.batch_size} packs of {self.pack_length}, lengths divided by {self.config.shrink}"
        )

    def tables_of(self, part):
        """The tables of a part: dict from name to rows."""
        config, model_config = self.config, self.model_config
        if part == "padding":
            sizes = config.max_seq_length, config.pack_length, config.window, config.random_seed
            return {part: padding_rates(self.lengths, *sizes)}
        if part == "training":
            return self._training_tables()
        if part == "operators":
            return {part: mamba_operators.measure_operators(model_config, self.batches, config.repeats)}
        if part == "resets":
            packs = self.batches[PACKED].batches
            return {part: reset_cost.measure_resets(model_config, packs, config.reset_repeats)}
        if part == "variants":
            if self.pack_length % CHUNK_LENGTH:
                raise InputError(
                    f"`pack_length` over shrink must be a multiple of {CHUNK_LENGTH}, a chunk of the scan. "
                    f"Received: {config.pack_length}, {config.shrink}."
                )
            packs = self.batches[PACKED].batches
            return {part: mamba_operators.measure_variants(model_config, packs, config.repeats)}
        lengths = [int(text) for text in config.memory_lengths.split(",")]
        return {part: mamba_speed.step_memory(model_config, lengths)}

    def _training_tables(self):
        config, given = self.config, (self.model_config, self.batches)
        rows, comparisons = mamba_speed.measure_training(*given, config.repeats)
        tables = {"training": rows, "packed against others": comparisons}
        if config.reference:
            sizes = config.reference_rows, config.reference_repeats
            row, compared = mamba_speed.measure_reference(*given, *sizes)
            tables = {**tables, "reference": [row], "packed against others": [*comparisons, compared]}
        return tables

    @functools.cached_property
    def batches(self):
        """What is timed, from `make_batches`."""
        config = self.config
        lengths = np.maximum(1, self.lengths // config.shrink)
        packs = choose_packs(lengths, self.pack_length, config.batch_size * config.num_steps)
        sizes = config.batch_size, config.num_shapes, self.model_config.vocab_size, config.random_seed
        return make_batches(packs, self.pack_length, self.row_length, *sizes)
