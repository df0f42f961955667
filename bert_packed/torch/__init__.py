"""Packed data and packed loss for training with torch, without Keras or TensorFlow.

    from bert_packed.torch import PackedBertForPreTraining, PackedDataset, pretraining_loss
    from bert_packed.torch import PackingCollator, enable_packing, pack_dataset, per_sequence_loss
    from bert_packed.torch import PackedStream, PackingTrainer

docs/guides/torch.md has complete training scripts, two for `transformers.Trainer`. Importing this imports
torch alone; the first use of `PackingTrainer` imports transformers.
"""

from bert_packed.torch.collator import PackingCollator, pack_dataset, per_sequence_loss
from bert_packed.torch.dataset import PackedDataset
from bert_packed.torch.packed_encoder import enable_packing
from bert_packed.torch.packed_stream import PackedStream
from bert_packed.torch.pretraining import PackedBertForPreTraining, pretraining_counts, pretraining_loss

__all__ = [
    "PackedBertForPreTraining",
    "PackedDataset",
    "PackedStream",
    "PackingCollator",
    "PackingTrainer",
    "enable_packing",
    "pack_dataset",
    "per_sequence_loss",
    "pretraining_counts",
    "pretraining_loss",
]


def __getattr__(name):
    if name != "PackingTrainer":
        raise AttributeError(f"module 'bert_packed.torch' has no attribute {name!r}")
    from bert_packed.torch.packed_trainer import PackingTrainer

    return PackingTrainer
