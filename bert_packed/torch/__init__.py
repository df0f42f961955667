"""Packed data and packed loss for training with torch, without Keras or TensorFlow.

    from bert_packed.torch import PackedBertForPreTraining, PackedDataset, pretraining_loss

docs/torch.md has a complete training script.
"""

from bert_packed.torch.dataset import PackedDataset
from bert_packed.torch.pretraining import PackedBertForPreTraining, pretraining_counts, pretraining_loss

__all__ = [
    "PackedBertForPreTraining",
    "PackedDataset",
    "pretraining_counts",
    "pretraining_loss",
]
