"""A `transformers.Trainer` whose evaluation losses and logs know what packs hold."""

import copy

import torch
import transformers

from bert_packed.assembly.given_columns import SEQUENCE_IDS, refuse
from bert_packed.packing.arguments import shown
from bert_packed.torch.collator import PackingCollator
from bert_packed.torch.labelled_rows import IGNORED


class PackingTrainer(transformers.Trainer):
    """`Trainer` for a `PackingCollator`, with exact losses of evaluations and figures of packing in its log.

    - `eval_loss` is the mean over all predictions or labels of the evaluation set, or with
      `per_sequence_loss` over its sequences. Trainer's is the mean of the batches' means. Several processes
      fill up a last batch that does not divide among them with the first rows, which count again.
    - Each training log has `packing_factor`, the sequences per pack, and `packing_efficiency`, the share of
      real tokens in what is computed, of all processes since the log before.

    Args:
        *arguments, **options: Arguments of `transformers.Trainer`. `data_collator` is copied. In evaluation
            `compute_loss_func` gets no `num_items_in_batch`, and must return a mean over labels.

    Raises:
        ValueError: `data_collator` is no `PackingCollator`; in evaluation, a subclass's `compute_loss` does
            not call this one.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        if not isinstance(self.data_collator, PackingCollator):
            refuse("`data_collator`", "be a PackingCollator", shown(self.data_collator))
        self.data_collator = copy.copy(self.data_collator)  # another Trainer may have it
        self.data_collator.keeps_sequence_ids = True
        self._evaluated = []  # sums of losses, and counts
        self._counted = 0  # sequences, packs, real tokens, computed tokens

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Compute the loss of a batch as Trainer does, and count what the batch holds."""
        counts = _count(inputs, inputs.pop(SEQUENCE_IDS, None))
        if model.training:
            self._counted += counts
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        num_labels = (inputs["labels"] != IGNORED).sum()
        # The loss is a mean over the labels of this process, as no number of items is given
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        total = torch.where(num_labels > 0, loss.detach().float() * num_labels, 0)  # a mean over none is NaN
        self._evaluated.append(torch.stack([total, num_labels]))
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *arguments, metric_key_prefix="eval", **options):
        """Evaluate as Trainer does, and weigh losses by their counts."""
        self._evaluated = []
        output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **options)
        if f"{metric_key_prefix}_loss" in output.metrics and not self._evaluated:
            refuse("`compute_loss`", "call that of `PackingTrainer`, which counts", type(self).__name__)
        if self._evaluated:
            sums = torch.stack(self._evaluated).cpu().double().sum(0).float()  # some devices have no float64
            total, count = self.accelerator.reduce(sums.to(self.args.device)).tolist()
            output.metrics[f"{metric_key_prefix}_loss"] = total / max(1, count)
        return output

    def log(self, logs, *arguments, **options):
        """Log as Trainer does, with the figures of packing beside the loss of training."""
        if "loss" in logs and torch.is_tensor(self._counted):
            num_sequences, num_packs, num_real, num_computed = self.accelerator.reduce(self._counted).tolist()
            self._counted = 0
            logs["packing_factor"] = num_sequences / num_packs
            logs["packing_efficiency"] = num_real / num_computed
        super().log(logs, *arguments, **options)


def _count(inputs, sequence_ids):
    """Sequences, packs, real tokens and computed tokens of a batch: int64 `[4]`."""
    if sequence_ids is not None:
        num_sequences, num_tokens, packs = sequence_ids.amax(1).sum(), (sequence_ids > 0).sum(), sequence_ids
    else:  # of `labels`: a row a sequence
        num_sequences, num_tokens = len(inputs["input_ids"]), inputs["attention_mask"].sum()
        packs = inputs["pack_index"]
    numbers = (num_sequences, len(packs), num_tokens, packs.numel())
    return torch.stack([torch.as_tensor(number, device=packs.device) for number in numbers])
