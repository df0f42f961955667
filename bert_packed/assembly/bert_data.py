"""What packing must know of BERT's records: how they are read, held, measured and assembled."""

import dataclasses
import math

import numpy as np

from bert_packed import schema
from bert_packed.assembly.assemble import assemble_packs, count_predictions
from bert_packed.assembly.length_plan import plan_lengths
from bert_packed.assembly.overlong import fit_lengths
from bert_packed.core.settings import InputError
from bert_packed.packing import histogram as histograms
from bert_packed.records.inputs import check_vocabulary
from bert_packed.records.read_unpacked import read_unpacked
from bert_packed.records.sequences import BERT_LAYOUT, row_bytes


@dataclasses.dataclass(frozen=True)
class BertData:
    """BERT's records; `pack_data.PackData` says what each member is for.

    Attributes:
        max_seq_length: S.
        overlong: What happens to longer sequences, one of `overlong.OVERLONG_CHOICES`.
        vocab_size: Ids are below it; None where nobody says.
        max_predictions_per_pack: P asked for; 0 = as many as the fullest pack needs.
        masked_lm_weights: One of `schema.MASKED_LM_WEIGHTS_KINDS`.
    """

    max_seq_length: int
    overlong: str
    vocab_size: int | None
    max_predictions_per_pack: int
    masked_lm_weights: str = schema.SEQUENCE

    layout = BERT_LAYOUT
    measured_columns = ("lengths", "num_predictions")  # the columns that `measure` needs

    @property
    def num_lengths(self):
        """Lengths are below it."""
        return self.max_seq_length + 1

    def pack_bytes(self, depth):
        """About how many bytes the columns of a full pack take, which holds `depth` sequences."""
        num_predictions = schema.default_predictions(self.max_seq_length)
        return 5 * self.max_seq_length + 8 * num_predictions + math.ceil(depth * row_bytes(self.layout))

    def read(self, path):
        """Read, check and fit one file.

        Yields:
            Columns of a batch; its number of records; dict of the sequences truncated and dropped.

        Raises:
            InputError: a record cannot be used.
        """
        for batch in read_unpacked(path):
            check_vocabulary(batch, self.vocab_size)
            fitted, num_overlong = fit_lengths(batch, self.max_seq_length, self.overlong)
            yield fitted, len(batch), num_overlong

    def lengths(self, columns):
        """What a plan is made for: int `[n]`, each from 1 and below `num_lengths`."""
        return columns["lengths"]

    def describe_lengths(self, histogram):
        """What the manifest says of a histogram `[num_lengths]`: the `lengths` that occur, and `counts`."""
        return histograms.to_json(histogram[1:])

    def measure(self, columns, packs):
        """The most predictions in any of some packs."""
        return int(count_predictions(packs, columns["num_predictions"]).max(initial=0))

    def make_plan(self, histogram, algorithm, depth):
        """Plan the packs for a histogram `[num_lengths]`: see `plan_lengths`."""
        return plan_lengths(histogram[1:], algorithm, self.max_seq_length, depth)

    def make_spec(self, depth, measured):
        """The shapes of the packed record.

        Args:
            depth: K.
            measured: The largest number of all that `measure` found.

        Raises:
            InputError: there is less room for predictions than they need.
        """
        # a feature of length 0 cannot be told from a missing one: data without predictions has room for one
        needed = max(measured, 1)
        if self.max_predictions_per_pack and self.max_predictions_per_pack < needed:
            raise InputError(
                f"`max_predictions_per_pack` must be at least {needed}, which the fullest pack needs, or 0. "
                f"Received: {self.max_predictions_per_pack}."
            )
        return schema.PackSpec(self.max_seq_length, depth, self.max_predictions_per_pack or needed)

    def assemble(self, columns, packs, spec):
        """The arrays of packed records: dict from feature to array `[number of packs, ...]`."""
        arrays = assemble_packs(columns, packs, spec)
        if self.masked_lm_weights == schema.BINARY:
            arrays[schema.MASKED_LM_WEIGHTS] = np.minimum(arrays[schema.MASKED_LM_WEIGHTS], 1)
        return arrays
