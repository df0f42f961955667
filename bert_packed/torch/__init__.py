"""Packed data and packed loss for training with torch, without Keras or TensorFlow.

    from bert_packed.torch import PackedBertForPreTraining, PackedDataset, pretraining_loss
    from bert_packed.torch import PackingCollator, enable_packing, pack_dataset, per_sequence_loss
    from bert_packed.torch import PackedStream, PackingTrainer

docs/guides/torch.md has complete training scripts, two for `transformers.Trainer`. The first use of a name
imports what it needs: the command line reads settings from here where torch is not installed.
"""

import importlib

_MODULES = {
    "PackedBertForPreTraining": "pretraining",
    "PackedDataset": "dataset",
    "PackedStream": "packed_stream",
    "PackingCollator": "collator",
    "PackingTrainer": "packed_trainer",
    "enable_packing": "packed_encoder",
    "pack_dataset": "collator",
    "per_sequence_loss": "collator",
    "pretraining_counts": "pretraining",
    "pretraining_loss": "pretraining",
}
__all__ = sorted(_MODULES)


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__():
    return sorted({*globals(), *__all__})
