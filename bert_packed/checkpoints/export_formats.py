"""Exports of trained models for Hugging Face, with their tokenizers, for Keras and TensorFlow's SavedModel.

Legend: B packs per call, S pack length, P predictions per pack, K sequences per pack, D model width,
V vocabulary, C classes.
"""

import json
import shutil
from pathlib import Path

import numpy as np
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing

from bert_packed import schema
from bert_packed.architectures import registry
from bert_packed.architectures.registry import check_at_most, family_of
from bert_packed.checkpoints.checkpoint import write_tensors
from bert_packed.core.settings import InputError
from bert_packed.text import byte_bpe, tokenization
from bert_packed.text.vocabularies import TOKENIZER_JSON, boundary_ids, count_tokens, file_name
from bert_packed.training.nonfinite import check_arrays

KERAS_FILE = "model.keras"
# Heads have these inputs besides the encoder's, by the length of their rows. Each has only what it reads:
# TensorFlow drops other inputs, and then refuses them
_HEAD_INPUTS = {
    registry.PRETRAINING: {"prediction_positions": "P", "cls_positions": "K"},
    registry.MASKED_LM: {"prediction_positions": "P"},
    registry.CLASSIFICATION: {"cls_positions": "K"},
}
# google-research/bert's names, of the rows of one sequence
_UNPACKED_NAMES = {
    "token_ids": schema.INPUT_IDS,
    "token_type_ids": schema.SEGMENT_IDS,
    "prediction_positions": schema.MASKED_LM_POSITIONS,
}


def signature_letters(head):
    """The set of those of S, K and P that are sizes of an input of a head's SavedModel."""
    return {"S", *_HEAD_INPUTS.get(head, {}).values()}


def write_hugging_face(
    folder,
    model,
    weights,
    missing=(),
    vocab_file="",
    do_lower_case=True,
    classes=(),
    max_length=None,
    more=None,
):
    """Write `config.json` and `model.safetensors` for the class of transformers that has the model's head.

    Args:
        missing: Our names of tensors to leave out because they were never trained; transformers reports them.
        vocab_file: WordPieces, one a line, or a `tokenizer.json`, to write a tokenizer too; "" for none.
        classes: Names of the model's classes; () where they have none.
        more: Dict of further entries of `config.json`; None for none.
        max_length: Most tokens that a tokenizer gives the model; None is as many as it has positions for.
    """
    folder, family = Path(folder), family_of(model.config)
    names = family.load_names()
    if model.head not in names.classes:
        raise InputError(f"`format` must not be hf for a {family.name}. Received: hf, of head {model.head}.")
    tensors = {}
    for row in names.tensor_names(model.config, model.head):
        if row.ours not in missing:
            values = weights[row.ours].numpy().astype(np.float32)
            tensors[row.hugging_face] = np.ascontiguousarray(row.to_hugging_face(values))
    check_arrays(tensors, "of the export")
    # transformers refuses a file without the format
    write_tensors(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"architectures": [names.classes[model.head]], **names.hugging_face_config(model)}
    if classes:
        config["id2label"] = {str(number): name for number, name in enumerate(classes)}
        config["label2id"] = {name: number for number, name in enumerate(classes)}
    ids = names.token_ids(vocab_file)
    (folder / "config.json").write_text(json.dumps(config | ids | (more or {}), indent=1) + "\n")
    if vocab_file:
        limit = model.config.max_position_embeddings
        if limit is not None and max_length:  # None for an architecture without positions
            limit = min(limit, max_length)
        write_tokenizer(folder, vocab_file, do_lower_case, limit, ids)


def write_keras(folder, model):
    """Write `model.keras`: `keras.saving.load_model` opens it once the model's module is imported."""
    model.save(Path(folder) / KERAS_FILE)


def write_saved_model(folder, model, spec, batch_size):
    """Write a SavedModel with two signatures of static shapes, from a model under the TensorFlow backend.

    | signature | inputs, int32 |
    |---|---|
    | `packed` | those of the model |
    | `unpacked`, and `serving_default` | `input_ids`, `input_mask` (1 = token, 0 = padding at the end), where the model reads it sentence A/B, `[B, S]`; to predict masked tokens `masked_lm_positions` `[B, P]` |

    | model | returns, float32; unpacked, K is 1 |
    |---|---|
    | pre-trained | `hidden_states` `[B, S, D]`, `mlm_logits` `[B, P, V]`, with next sentences `nsp_logits` `[B, K, 2]` |
    | question answering | `start_logits` and `end_logits` `[B, S]` |
    | classification | `logits` `[B, K, C]` |
    | token classification | `logits` `[B, S, C]` |
    | causal language modelling | `hidden_states` `[B, S, D]`, `logits` `[B, S, V]` |
    """  # noqa: E501  a table row is longer than a line of code
    import keras
    import tensorflow as tf

    def packed(batch):
        if model.head in registry.FINETUNING_HEADS:
            return model(batch, training=False)
        hidden_BSD = model.encode(batch)
        heads = model.apply_heads(hidden_BSD, batch, training=False)
        return {"hidden_states": tf.cast(hidden_BSD, tf.float32), **heads}

    def unpacked(batch):
        sequence_ids_BS = batch[schema.INPUT_MASK]
        return packed(
            {
                **{ours: batch[theirs] for ours, theirs in _UNPACKED_NAMES.items() if theirs in batch},
                "sequence_ids": sequence_ids_BS,
                "position_ids": tf.range(spec.max_seq_length)[None] * sequence_ids_BS,
                "cls_positions": tf.zeros((batch_size, 1), tf.int32),
            }
        )

    def inputs(letters):
        return {
            name: tf.TensorSpec((batch_size, spec.size(letter)), tf.int32, name=name)
            for name, letter in letters.items()
        }

    packed_letters = {**dict.fromkeys(model.encoder_inputs, "S"), **_HEAD_INPUTS.get(model.head, {})}
    named = {
        theirs: packed_letters[ours] for ours, theirs in _UNPACKED_NAMES.items() if ours in packed_letters
    }
    archive = keras.export.ExportArchive()
    archive.track(model)
    # The endpoint that comes first also becomes serving_default
    archive.add_endpoint("unpacked", unpacked, [inputs({**named, schema.INPUT_MASK: "S"})])
    archive.add_endpoint("packed", packed, [inputs(packed_letters)])
    archive.write_out(str(folder), verbose=False)


def check_vocabulary(vocab_file, config, argument="vocab_file"):
    """Check a vocabulary's form, number of tokens and special tokens; messages name the flag `argument`."""
    check_form(vocab_file, config, argument)
    check_at_most(config, "vocab_size", f"the vocabulary of `{argument}`", count_tokens(vocab_file))
    boundary_ids(vocab_file)  # which reads it, before anything is written


def check_form(vocab_file, config, argument="vocab_file"):
    family = family_of(config)
    if file_name(vocab_file) not in family.load_names().vocabularies:
        raise InputError(
            f"`{argument}` must have one WordPiece a line for a {family.name}. Received: {vocab_file}."
        )


def write_tokenizer(folder, vocab_file, do_lower_case, max_length=None, ids=None):
    """Write the files that `transformers.AutoTokenizer.from_pretrained` opens.

    `do_lower_case` is for WordPieces alone, and `ids`, as `encoder_ids` has them, for a `tokenizer.json`.
    """
    # Texts become the ids that they had in training, except "[MASK]": there it is the special token, as users
    # of `fill-mask` expect, here punctuation and letters. `split_special_tokens=True` gives ours
    shutil.copyfile(vocab_file, folder / file_name(vocab_file))
    if file_name(vocab_file) == TOKENIZER_JSON:
        tokenizer = byte_bpe.load(vocab_file).tokenizer
        special = {
            name.removesuffix("_id"): tokenizer.id_to_token(index)
            for name, index in (ids or {}).items()
            if index is not None
        }
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
        # The file may have none, or RoBERTa's, whose pairs have two tokens between them
        if "cls_token" in special:
            byte_bpe.set_template(tokenizer, special["cls_token"], special["sep_token"])
            byte_bpe.save(tokenizer, folder / TOKENIZER_JSON)
    else:
        _wordpiece_tokenizer(vocab_file, do_lower_case).save(str(folder / TOKENIZER_JSON))
        settings = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": do_lower_case,
            "strip_accents": do_lower_case,
            "tokenize_chinese_chars": True,
            "unk_token": tokenization.UNK,
            "sep_token": tokenization.SEP,
            "pad_token": tokenization.PAD,
            "cls_token": tokenization.CLS,
            "mask_token": tokenization.MASK,
        }
    # This limit keeps transformers from giving the model texts longer than its position table
    if max_length:
        settings["model_max_length"] = max_length
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _wordpiece_tokenizer(vocab_file, do_lower_case):
    vocabulary = tokenization.load_vocab(vocab_file)
    tokenizer = tokenization.make_tokenizer(vocabulary, do_lower_case)
    tokenizer.add_special_tokens(list(tokenization.SPECIAL_TOKENS))
    start, end = tokenization.CLS, tokenization.SEP
    tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[(start, vocabulary.cls_id), (end, vocabulary.sep_id)],
    )
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer
