"""How a trained model is written in the forms that others read: Hugging Face, Keras, SavedModel.

Legend: B packs per call, S pack length, P predictions per pack, K sequences per pack, D model width,
V vocabulary, C classes.
"""

import json
from pathlib import Path

import keras
import numpy as np
from safetensors.numpy import save_file

from bert_packed import schema
from bert_packed.checkpoints.exported_tokenizer import boundary_ids, write_tokenizer
from bert_packed.checkpoints.pretrained_names import architecture_of
from bert_packed.models.modeling import (
    CLASSIFICATION,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
)
from bert_packed.training.finite import check_arrays

KERAS_FILE = "model.keras"

# What the signatures of a SavedModel take, by the length of each row. Each head's inputs only: TensorFlow
# drops what nothing reads, and then refuses it
_PACKED_BERT = dict.fromkeys(("token_ids", "sequence_ids", "token_type_ids", "position_ids"), "S")
_UNPACKED_BERT = dict.fromkeys((schema.INPUT_IDS, schema.INPUT_MASK, schema.SEGMENT_IDS), "S")
_SIGNATURES = {
    PRETRAINING: (
        {**_PACKED_BERT, "prediction_positions": "P", "cls_positions": "K"},
        {**_UNPACKED_BERT, "masked_lm_positions": "P"},
    ),
    MASKED_LM: (
        {**_PACKED_BERT, "prediction_positions": "P"},
        {**_UNPACKED_BERT, "masked_lm_positions": "P"},
    ),
    QUESTION_ANSWERING: (_PACKED_BERT, _UNPACKED_BERT),
    TOKEN_CLASSIFICATION: (_PACKED_BERT, _UNPACKED_BERT),
    CLASSIFICATION: ({**_PACKED_BERT, "cls_positions": "K"}, _UNPACKED_BERT),
    schema.CAUSAL_LM: (
        {"token_ids": "S", "position_ids": "S"},
        {schema.INPUT_IDS: "S", schema.INPUT_MASK: "S"},
    ),
}


def signature_letters(head):
    """Which of S, K and P are sizes of an input of a head's SavedModel: a set."""
    return {letter for inputs in _SIGNATURES[head] for letter in inputs.values()}


def write_hugging_face(folder, model, weights, missing=(), vocab_file="", do_lower_case=True, classes=()):
    """Write `config.json` and `model.safetensors` for the class of transformers that has the model's head.

    Args:
        folder: Existing folder.
        model: A `PackedModel` with a head that the table of its architecture knows.
        weights: Dict from our names to what has its values, variables or what an engine holds to save.
        missing: Our names of tensors to leave out, because they were never trained: transformers then says
            that they are new.
        vocab_file: WordPieces, one a line, or a `tokenizer.json`, to write a tokenizer too; "" for none.
        do_lower_case: Whether a tokenizer of WordPieces removes case and accents.
        classes: Names of the classes that the model tells apart; () where they have none.
    """
    folder = Path(folder)
    architecture = architecture_of(model.config)
    tensors = {}
    for row in architecture.tensor_names(model.config, model.head):
        if row.ours not in missing:
            values = weights[row.ours].numpy().astype(np.float32)
            tensors[row.hugging_face] = np.ascontiguousarray(row.to_hugging_face(values))
    check_arrays(tensors, "of the export")
    # Without the format, transformers refuses the file
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": [architecture.classes[model.head]],
        **architecture.hugging_face_config(model),
    }
    if classes:
        config["id2label"] = {str(number): name for number, name in enumerate(classes)}
        config["label2id"] = {name: number for number, name in enumerate(classes)}
    if model.head == schema.CAUSAL_LM:
        # Without them transformers takes token 0 for both, whatever it is
        config |= boundary_ids(vocab_file)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if vocab_file:
        longest = getattr(model.config, "max_position_embeddings", None)  # a Mamba has no greatest length
        write_tokenizer(folder, vocab_file, do_lower_case, longest)


def write_keras(folder, model):
    """Write `model.keras`: `keras.saving.load_model` opens it once the model's module is imported."""
    model.save(Path(folder) / KERAS_FILE)


def write_saved_model(folder, model, spec, batch_size):
    """Write a SavedModel with two signatures of static shapes.

    | signature | inputs, int32 |
    |---|---|
    | `packed` | those of the model |
    | `unpacked`, and `serving_default` | `input_ids`, `input_mask` (1 = token, 0 = padding at the end), of a BERT sentence A/B, `[B, S]`; to predict masked tokens `masked_lm_positions` `[B, P]` |

    A Mamba reads positions alone: it takes no `sequence_ids`.

    | model | returns, float32; unpacked, K is 1 |
    |---|---|
    | pre-trained | `hidden_states` `[B, S, D]`, `mlm_logits` `[B, P, V]`, with next sentences `nsp_logits` `[B, K, 2]` |
    | question answering | `start_logits` and `end_logits` `[B, S]` |
    | classification | `logits` `[B, K, C]` |
    | token classification | `logits` `[B, S, C]` |
    | causal language modelling | `hidden_states` `[B, S, D]`, `logits` `[B, S, V]` |

    The unpacked names are google-research/bert's.

    Args:
        folder: Existing folder.
        model: As of `write_hugging_face`, made under the TensorFlow backend.
        spec: `schema.PackSpec`: S, K and P.
        batch_size: B.
    """  # noqa: E501  a table row is longer than a line of code
    import tensorflow as tf

    def packed(batch):
        if model.head in (QUESTION_ANSWERING, CLASSIFICATION, TOKEN_CLASSIFICATION):
            return model(batch, training=False)
        batch = {"sequence_ids": None, **batch}  # which a Mamba does not read
        hidden_BSD = model.encode(batch)
        heads = model.apply_heads(hidden_BSD, batch, training=False)
        return {"hidden_states": tf.cast(hidden_BSD, tf.float32), **heads}

    def unpacked(batch):
        sequence_ids_BS = batch["input_mask"]
        as_packs = {
            "token_ids": batch["input_ids"],
            "sequence_ids": sequence_ids_BS,
            "token_type_ids": batch.get(schema.SEGMENT_IDS),
            "position_ids": tf.range(spec.max_seq_length)[None] * sequence_ids_BS,
            "cls_positions": tf.zeros((batch_size, 1), tf.int32),
        }
        if model.head in (PRETRAINING, MASKED_LM):
            as_packs["prediction_positions"] = batch["masked_lm_positions"]
        return packed(as_packs)

    lengths = {
        "S": spec.max_seq_length,
        "K": spec.max_sequences_per_pack,
        "P": spec.max_predictions_per_pack,
    }
    packed_inputs, unpacked_inputs = (
        {
            name: tf.TensorSpec((batch_size, lengths[letter]), tf.int32, name=name)
            for name, letter in inputs.items()
        }
        for inputs in _SIGNATURES[model.head]
    )
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("unpacked", unpacked, [unpacked_inputs])  # the first also becomes serving_default
    archive.add_endpoint("packed", packed, [packed_inputs])
    archive.write_out(str(folder), verbose=False)
