"""The tokenizer of an exported model: WordPieces, or a `tokenizer.json`."""

import json
import shutil

from tokenizers import decoders
from tokenizers.processors import TemplateProcessing

from bert_packed.architectures.registry import check_at_most, family_of
from bert_packed.core.settings import InputError
from bert_packed.text import byte_bpe, tokenization
from bert_packed.text.vocabularies import TOKENIZER_JSON, boundary_ids, count_tokens, file_name


def check_vocabulary(vocab_file, config, argument="vocab_file"):
    """Raise `InputError`, naming the flag `argument`, unless a vocabulary is of a form for a model's family.

    It must also have special tokens, and no more tokens than the model.
    """
    check_form(vocab_file, config, argument)
    check_at_most(config, "vocab_size", f"the vocabulary of `{argument}`", count_tokens(vocab_file))
    boundary_ids(vocab_file)  # which reads it, before anything is written


def check_form(vocab_file, config, argument="vocab_file"):
    """Raise `InputError`, naming the flag `argument`, unless a model's family takes such a file."""
    family = family_of(config)
    if file_name(vocab_file) not in family.load_names().vocabularies:
        raise InputError(
            f"`{argument}` must have one WordPiece a line for a {family.name}. Received: {vocab_file}."
        )


def write_tokenizer(folder, vocab_file, do_lower_case, max_length=None, ids=None):
    """Write the files that `transformers.AutoTokenizer.from_pretrained` opens.

    Texts become the ids that they had in training, except "[MASK]": there it is the special token, as users
    of `fill-mask` expect, here punctuation and letters. `split_special_tokens=True` gives ours.

    Args:
        folder: Existing folder.
        vocab_file: Path; it is copied, WordPieces beside the `tokenizer.json` that is made of them. A
            `tokenizer.json` of an encoder gets the template of its training, which is ModernBERT's.
        do_lower_case: True where a tokenizer of WordPieces removes case and accents; a `tokenizer.json` has
            its own rule.
        max_length: Most tokens that the model takes; None for no limit.
        ids: Dict as of `boundary_ids` or `encoder_ids`, of the special tokens of a `tokenizer.json`.
    """
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
    """Our tokenizer with special tokens, sentences A and B, and a decoder."""
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
