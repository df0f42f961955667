"""How a trained model is written in the forms that others read: Hugging Face, Keras, SavedModel.

Legend: B packs per call, S pack length, P predictions per pack, K sequences per pack, D model width,
V vocabulary, C classes.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import keras
import numpy as np
from safetensors.numpy import save_file

from bert_packed.checkpoints.pretrained_names import (
    CLASSIFICATION,
    PRETRAINING,
    QUESTION_ANSWERING,
    tensor_names,
)
from bert_packed.training.engines.variables import named_weights
from data_gen import schema

KERAS_FILE = "model.keras"
ARCHITECTURES = {
    PRETRAINING: "BertForPreTraining",
    QUESTION_ANSWERING: "BertForQuestionAnswering",
    CLASSIFICATION: "BertForSequenceClassification",
}


def write_hugging_face(folder, model, missing=(), vocab_file="", do_lower_case=True):
    """Write `config.json` and `model.safetensors` for the class of transformers that has the model's head.

    Args:
        folder: Existing folder.
        model: `PackedBertForPretraining`, `PackedBertForQuestionAnswering` or `PackedBertForClassification`.
        missing: Our names of tensors to leave out, because they were never trained: transformers then says
            that they are new.
        vocab_file: WordPieces, one a line, to write a tokenizer too; "" for none.
        do_lower_case: Whether that tokenizer removes case and accents.
    """
    folder, weights = Path(folder), named_weights(model)
    tensors = {}
    for row in tensor_names(model.config.num_hidden_layers, model.head):
        if row.ours not in missing:
            values = weights[row.ours].numpy().astype(np.float32)
            tensors[row.hugging_face] = np.ascontiguousarray(
                values.T if row.hugging_face_transposed else values
            )
    # Without the format, transformers refuses the file
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": [ARCHITECTURES[model.head]],
        "model_type": "bert",
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        **dataclasses.asdict(model.config),
    }
    if model.head == CLASSIFICATION:
        # transformers takes one label for a number to predict
        config["num_labels"] = model.classification.classifier.units
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if vocab_file:
        shutil.copyfile(vocab_file, folder / "vocab.txt")
        tokenizer = {"tokenizer_class": "BertTokenizer", "do_lower_case": do_lower_case}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1) + "\n")


def write_keras(folder, model):
    """Write `model.keras`: `keras.saving.load_model` opens it once the model's module is imported."""
    model.save(Path(folder) / KERAS_FILE)


def write_saved_model(folder, model, spec, batch_size):
    """Write a SavedModel with two signatures of static shapes.

    | signature | inputs, int32 |
    |---|---|
    | `packed` | those of the model |
    | `unpacked`, and `serving_default` | `input_ids`, `input_mask` (1 = token, 0 = padding), sentence A/B, `[B, S]`; to predict masked tokens `masked_lm_positions` `[B, P]` |

    | model | returns, float32; unpacked, K is 1 |
    |---|---|
    | pre-trained | `hidden_states` `[B, S, D]`, `mlm_logits` `[B, P, V]`, `nsp_logits` `[B, K, 2]` |
    | question answering | `start_logits` and `end_logits` `[B, S]` |
    | classification | `logits` `[B, K, C]` |

    The unpacked names are google-research/bert's.

    Args:
        folder: Existing folder.
        model: As of `write_hugging_face`, made under the TensorFlow backend.
        spec: `schema.PackSpec`: S, K and P.
        batch_size: B.

    """  # noqa: E501  a table row is longer than a line of code
    import tensorflow as tf

    def packed(batch):
        if model.head != PRETRAINING:
            return model(batch, training=False)
        hidden_BSD = model.encode(batch)
        heads = model.apply_heads(hidden_BSD, batch, training=False)
        return {"hidden_states": tf.cast(hidden_BSD, tf.float32), **heads}

    def unpacked(batch):
        sequence_ids_BS = batch["input_mask"]
        as_packs = {
            "token_ids": batch["input_ids"],
            "sequence_ids": sequence_ids_BS,
            "token_type_ids": batch[schema.SEGMENT_IDS],
            "position_ids": tf.range(spec.max_seq_length)[None] * sequence_ids_BS,
            "cls_positions": tf.zeros((batch_size, 1), tf.int32),
        }
        if model.head == PRETRAINING:
            as_packs["prediction_positions"] = batch["masked_lm_positions"]
        return packed(as_packs)

    # Each head's inputs only: TensorFlow drops what nothing reads, and then refuses it
    names = [(spec.max_seq_length, ("token_ids", "sequence_ids", "token_type_ids", "position_ids"))]
    unpacked_names = [(spec.max_seq_length, (schema.INPUT_IDS, schema.INPUT_MASK, schema.SEGMENT_IDS))]
    if model.head == PRETRAINING:
        names.append((spec.max_predictions_per_pack, ("prediction_positions",)))
        unpacked_names.append((spec.max_predictions_per_pack, ("masked_lm_positions",)))
    if model.head != QUESTION_ANSWERING:
        names.append((spec.max_sequences_per_pack, ("cls_positions",)))
    packed_inputs, unpacked_inputs = _specs(batch_size, *names), _specs(batch_size, *unpacked_names)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("unpacked", unpacked, [unpacked_inputs])  # the first also becomes serving_default
    archive.add_endpoint("packed", packed, [packed_inputs])
    archive.write_out(str(folder), verbose=False)


def _specs(batch_size, *groups):
    """Dict from input name to its `TensorSpec`; groups are (length, names)."""
    import tensorflow as tf

    return {
        name: tf.TensorSpec((batch_size, length), tf.int32, name=name)
        for length, names in groups
        for name in names
    }
