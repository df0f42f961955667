"""What is learnt: one object that engines, loop, runs and audit ask, and that each kind of training fills in.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from keras import ops

from bert_packed.models.flops import bert_flops
from bert_packed.objectives.features import Feature
from bert_packed.objectives.metrics import COUNT_NAMES, perplexity, ratio


@dataclasses.dataclass(frozen=True)
class Objective:
    """A model with its heads, and the sums that are minimised and watched.

    Every loss is a sum over sequences of what each would have alone, divided once, by a count over the whole
    step. So micro-batches and replicas add up exactly, and packing cannot be seen. For this the sums must
    honour two rules: only weights decide what counts (a sequence whose `slot_weights` is 0, or a prediction
    whose `prediction_sequences` is 0, adds nothing to any sum, whatever else the batch says of it), and
    nothing is divided by a count of the batch.

    Attributes:
        build_model: Function `(config, seed, **options)` to a `modeling.PackedModel` with its heads; options
            as of `build_pretraining_model`.
        features: What a batch holds, `Feature`s; `sequence_ids` and `slot_weights` are always among them.
        outputs: Dict from the name of each output of the model to what its rows stand for: "S", tokens, "P",
            predictions, or "K", sequences.
        sums: Function `(outputs, batch)` to a dict of float32 scalars, `sum_names`.
        counts: Function from a batch, of a step or of one micro-batch, to those of the sums that follow from
            the data alone, `COUNT_NAMES` among them.
        losses: Dict from each sum that is minimised to the count that divides it.
        accuracies: Dict from a figure to a pair of sums: what is divided, and by what.
        perplexities: Dict from a figure to such a pair; the figure is e to the power of their ratio.
        model_flops: Function `(config, sums)` to the operations of the model, as in `models/flops.py`.
        skips_empty: Whether micro-batches at the end that hold no sequence are skipped. The program stays
            one: the number of rounds of its loop follows from the data. Dropout goes on as if none were.
    """

    build_model: Callable[..., Any]
    features: tuple[Feature, ...]
    outputs: dict[str, str]
    sums: Callable[[dict, dict], dict]
    counts: Callable[[dict], dict]
    losses: dict[str, str]
    accuracies: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    perplexities: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    model_flops: Callable[[Any, dict], float] = bert_flops
    skips_empty: bool = False

    @property
    def sum_names(self):
        """The keys of `sums`, each once: tuple of str."""
        pairs = (*self.losses.items(), *self.accuracies.values(), *self.perplexities.values())
        return tuple(dict.fromkeys([*(name for pair in pairs for name in pair), *COUNT_NAMES]))

    @property
    def figures(self):
        """The keys of `means`, columns of the logs: tuple of str."""
        return tuple(self.means(dict.fromkeys(self.sum_names, 0.0)))

    def denominators(self, counts):
        """What a step's losses are divided by, known before its first micro-batch from the data alone.

        A division by what each micro-batch, or each device, holds would weigh sequences by the company they
        keep.

        Args:
            counts: Of `counts`, over the whole step.

        Returns:
            Dict from loss to a float32 scalar, at least 1.
        """
        return {name: ops.maximum(counts[count], 1.0) for name, count in self.losses.items()}

    def loss(self, sums, denominators):
        """The scalar that is differentiated, of sums of a step or of one of its micro-batches."""
        return sum(sums[name] / denominator for name, denominator in denominators.items())

    def means(self, sums):
        """The figures that people read.

        Args:
            sums: Dict of floats, summed over any number of batches.

        Returns:
            Dict: `loss`, the parts that it is the sum of, the accuracies and the perplexities. A mean over
            nothing is 0, and a perplexity of nothing NaN: 1 would be the best.
        """
        parts = {name: ratio(sums[name], sums[count]) for name, count in self.losses.items()}
        rates = {name: ratio(sums[total], sums[count]) for name, (total, count) in self.accuracies.items()}
        perplexities = {
            name: perplexity(sums[total] / sums[count]) if sums[count] else math.nan
            for name, (total, count) in self.perplexities.items()
        }
        return {"loss": sum(parts.values()), **parts, **rates, **perplexities}
