"""Base of all objectives, and the sums that they share.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack, C classes.
"""

import dataclasses
import math
from collections.abc import Callable

from keras import ops

from bert_packed.architectures import packed_model
from bert_packed.architectures.registry import family_of
from bert_packed.objectives.features import Feature

LARGEST_EXPONENT = 709  # whose power of e is a finite float
COUNT_NAMES = ("num_sequences", "num_tokens", "num_pairs")


@dataclasses.dataclass(frozen=True)
class Objective:
    """The head of a model, its losses, and the sums for losses and metrics.

    Each loss is a sum over sequences of the loss that each would have alone, divided once by a count over
    the whole step. So micro-batches and replicas add up exactly, and packing does not change a loss. Two
    rules follow. `sums` divides nothing by a count of the batch. A sequence whose `slot_weights` is 0, or a
    prediction whose `prediction_sequences` is 0, adds nothing to any sum, whatever its other values.
    """

    head: str
    features: tuple[Feature, ...]  # of a batch, `sequence_ids` and `slot_weights` among them
    outputs: dict[str, str]  # from the model's outputs to "S", "P" or "K": by token, prediction or sequence
    sums: Callable[[dict, dict], dict]  # (outputs, batch) to float32 scalars, `sum_names`
    counts: Callable[[dict], dict]  # batch to the sums that need no model, `COUNT_NAMES` among them
    losses: dict[str, str]  # from each sum that is minimised to the count that divides it
    # Each figure has a dividend and a divisor, both sums; a perplexity is e to the power of their ratio
    accuracies: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    perplexities: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    num_outputs: int | None = None  # classes, 1 for a number; None where the head does not classify
    # (outputs, batch) to float32 `[B, K, D]`, where a loss compares all sequences of a step. `sums` is then
    # called once a step, with {"vectors": those of all packs} and arrays `[B, K]`, and leaves out `counts`
    vectors: Callable[[dict, dict], object] | None = None
    skips_empty: bool = False  # skip empty micro-batches at the end of a step, yet advance dropout's seeds

    def build_model(self, config, seed, **options):
        """A model of any architecture with this head; arguments as in `packed_model.build_model`."""
        return packed_model.build_model(self.head, config, seed, num_outputs=self.num_outputs, **options)

    def model_flops(self, config, sums):
        """Floating-point operations of training on the sequences of these `sums`: float."""
        return family_of(config).load_models().count_flops(self.head, config, sums)

    @property
    def sum_names(self):
        """The keys of `sums`."""
        pairs = (*self.losses.items(), *self.accuracies.values(), *self.perplexities.values())
        return tuple(dict.fromkeys([*(name for pair in pairs for name in pair), *COUNT_NAMES]))

    @property
    def figures(self):
        """The keys of `means`, columns of the logs."""
        return tuple(self.means(dict.fromkeys(self.sum_names, 0.0)))

    def slots(self, batch):
        """The arrays of a batch with a value for each sequence, `[B, K]`: dict."""
        return {feature.name: batch[feature.name] for feature in self.features if feature.length == "K"}

    def denominators(self, counts):
        """Divisors of a step's losses, at least 1, from `counts` over the whole step."""
        # Counts of a micro-batch or device would not do: a sequence's weight would depend on the others in it
        return {name: ops.maximum(counts[count], 1.0) for name, count in self.losses.items()}

    def loss(self, sums, denominators):
        """The scalar to differentiate, from the sums of a step or of one of its micro-batches."""
        return sum(sums[name] / denominator for name, denominator in denominators.items())

    def means(self, sums):
        """Losses, accuracies and perplexities from sums over any number of batches.

        Without any sequence, as from {}, means are 0 and perplexities NaN.
        """
        sums = {**dict.fromkeys(self.sum_names, 0.0), **sums}
        parts = {name: _ratio(sums[name], sums[count]) for name, count in self.losses.items()}
        rates = {name: _ratio(sums[total], sums[count]) for name, (total, count) in self.accuracies.items()}
        # A perplexity of nothing is not 1, which would be the best one
        perplexities = {
            name: _perplexity(sums[total] / sums[count]) if sums[count] else math.nan
            for name, (total, count) in self.perplexities.items()
        }
        return {"loss": sum(parts.values()), **parts, **rates, **perplexities}


def count_sequences(batch):
    """Counts of all objectives, `COUNT_NAMES`: dict of float32 scalars.

    `num_pairs`, for the FLOPs of attention, counts ordered pairs of tokens of one sequence.

        sequence_ids [1 1 1 2 2 0]   ->   num_tokens 5, num_pairs 9 + 4
    """
    sequence_ids_BS1 = batch["sequence_ids"][:, :, None]
    slots_K = ops.arange(1, batch["slot_weights"].shape[1] + 1, dtype="int32")
    lengths_BK = ops.sum(ops.cast(ops.equal(ops.cast(sequence_ids_BS1, "int32"), slots_K), "float32"), axis=1)
    return {
        "num_sequences": ops.sum(batch["slot_weights"]),
        "num_tokens": ops.sum(ops.cast(batch["sequence_ids"] > 0, "float32")),
        "num_pairs": ops.sum(ops.square(lengths_BK)),
    }


def nll_and_right(logits, labels):
    """Negative log-likelihood of integer labels, and 1 if no logit exceeds the label's: float32.

    logits [[1 3 2]], label [1]   ->   nll [log(e + e^3 + e^2) - 3], right [1]
    """
    # Logits over a vocabulary are the largest array of a step. XLA fuses this comparison with the softmax;
    # `argmax`, a gather and its gradient would be further passes
    classes_C = ops.arange(logits.shape[-1], dtype="int32")
    is_label = ops.equal(ops.cast(labels, "int32")[..., None], classes_C)
    label_logits = ops.sum(ops.where(is_label, logits, 0.0), axis=-1)
    largest = ops.stop_gradient(ops.max(logits, axis=-1))
    # Subtract the largest logit from the label's first: adding a large logit to the logarithm would lose it
    nll = ops.log(ops.sum(ops.exp(logits - largest[..., None]), axis=-1)) - (label_logits - largest)
    return nll, ops.cast(label_logits >= largest, "float32")


def add_sums(total, sums):
    """Add one step's sums to a running total, {} at first: dict of floats."""
    return {name: total.get(name, 0.0) + float(value) for name, value in sums.items()}


def _perplexity(nll):
    return math.exp(nll) if nll < LARGEST_EXPONENT else math.inf


def _ratio(total, count):
    return total / count if count else 0.0
