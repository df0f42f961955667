"""Sequence packing for encoders: plans with a proof, packs, training that wastes next to nothing on padding.

    import bert_packed

    packs = bert_packed.pack([[5, 6, 7], [8, 9]], max_seq_length=8)

docs/reference/api.md has all names below, with examples. Importing this imports no other package. The first
use of a name imports what it needs; plans, packs, masks and audits need neither Keras nor TensorFlow.
"""

import importlib

from bert_packed.tasks.registry import TASKS

_MODULES = {
    "plan": "bert_packed.assembly.in_memory",
    "pack": "bert_packed.assembly.in_memory",
    "pack_stream": "bert_packed.assembly.in_memory",
    "unpack": "bert_packed.assembly.in_memory",
    "verify_plan": "bert_packed.assembly.in_memory",
    "attention_mask": "bert_packed.assembly.block_attention_mask",
    "audit_model": "bert_packed.evaluation.model_audit",
    "PretrainingConfig": "bert_packed.runs.pretraining_config",
    "pretrain": "bert_packed.runs.pretrain",
    **{task.config_name: f"{task.package}.config" for task in TASKS.values()},
    "similarity": "bert_packed.evaluation.inference",
    "finetune": "bert_packed.tasks.registry",
    "TrainConfig": "bert_packed.text_to_model.config",
    "train": "bert_packed.text_to_model.steps",
    "load_classifier": "bert_packed.tasks.classify.inference",
    "load_encoder": "bert_packed.evaluation.inference",
}
__all__ = sorted(_MODULES)


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(f"module 'bert_packed' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__():
    return sorted({*globals(), *__all__})
