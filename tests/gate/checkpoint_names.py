"""Names of its tensors here and in Hugging Face's form."""

from bert_packed.architectures.registry import (
    MASKED_LM,
    CheckpointNames,
    TensorName,
    config_json,
    linear_names,
)


def tensor_names(config, head):
    table = [TensorName("table", "gates.embeddings.weight"), TensorName("bias", "head.bias")]
    for i in range(config.num_hidden_layers):
        for part in ("gate", "mix"):
            table += linear_names(f"block_{i}/{part}", f"gates.layers.{i}.{part}")
    return table


NAMES = CheckpointNames(
    tensor_names=tensor_names,
    outputs={MASKED_LM: TensorName("bias", "head.bias")},
    encoder="block_",
    classes={MASKED_LM: "GateForMaskedLM"},
    hugging_face_config=lambda model: config_json(model.config),
)
