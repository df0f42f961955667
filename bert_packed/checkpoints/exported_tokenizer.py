"""The tokenizer of an exported model: WordPieces, or a `tokenizer.json`."""

import json
import shutil
from pathlib import Path

from tokenizers import decoders
from tokenizers.processors import TemplateProcessing

from bert_packed.config import check_at_most, family_of
from bert_packed.core.settings import InputError
from bert_packed.text import byte_bpe, tokenization

WORDPIECES, TOKENIZER_JSON = "vocab.txt", "tokenizer.json"
# By transformers' names
_SPECIAL_TOKENS = {
    "unk_token": tokenization.UNK,
    "sep_token": tokenization.SEP,
    "pad_token": tokenization.PAD,
    "cls_token": tokenization.CLS,
    "mask_token": tokenization.MASK,
}


def file_name(vocab_file):
    """The name of a vocabulary's file in a folder of Hugging Face."""
    return TOKENIZER_JSON if vocab_file.endswith(".json") else WORDPIECES


def check_vocabulary(vocab_file, config, argument="vocab_file"):
    """Raise `InputError`, naming the flag `argument`, unless a vocabulary is of a form for a model's family.

    It must also have special tokens, and no more tokens than the model.
    """
    family = family_of(config)
    if file_name(vocab_file) not in family.load_names().vocabularies:
        raise InputError(
            f"`{argument}` must have one WordPiece a line for a {family.name}. Received: {vocab_file}."
        )
    if file_name(vocab_file) == TOKENIZER_JSON:
        size = byte_bpe.load(vocab_file).vocab_size
    else:
        size = len(Path(vocab_file).read_bytes().rstrip(b"\n").split(b"\n"))
    check_at_most(config, "vocab_size", f"the vocabulary of `{argument}`", size)
    boundary_ids(vocab_file)  # which reads it, before anything is written


def boundary_ids(vocab_file):
    """Ids of the tokens that open and close a document, by transformers' names; None without vocabulary."""
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"))
    if not vocab_file:
        return ids
    if file_name(vocab_file) == TOKENIZER_JSON:
        found = byte_bpe.load(vocab_file)
        return dict(zip(ids, (found.start_id, found.end_id), strict=True))
    vocabulary = tokenization.load_vocab(vocab_file)
    return dict(zip(ids, (vocabulary.cls_id, vocabulary.sep_id), strict=True))


def write_tokenizer(folder, vocab_file, do_lower_case, max_length=None):
    """Write the files that `transformers.AutoTokenizer.from_pretrained` opens.

    Texts become the ids that they had in training, except "[MASK]": there it is the special token, as users
    of `fill-mask` expect, here punctuation and letters. `split_special_tokens=True` gives ours.

    Args:
        folder: Existing folder.
        vocab_file: Path; it is copied, WordPieces beside the `tokenizer.json` that is made of them.
        do_lower_case: True where a tokenizer of WordPieces removes case and accents; a `tokenizer.json` has
            its own rule.
        max_length: Most tokens that the model takes; None for no limit.
    """
    shutil.copyfile(vocab_file, folder / file_name(vocab_file))
    if file_name(vocab_file) == TOKENIZER_JSON:
        found = byte_bpe.load(vocab_file)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": found.tokenizer.id_to_token(found.start_id),
            "eos_token": found.tokenizer.id_to_token(found.end_id),
        }
        known = found.tokenizer.get_vocab()
        settings |= {name: token for name, token in _SPECIAL_TOKENS.items() if token in known}
    else:
        _wordpiece_tokenizer(vocab_file, do_lower_case).save(str(folder / TOKENIZER_JSON))
        settings = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": do_lower_case,
            "strip_accents": do_lower_case,
            "tokenize_chinese_chars": True,
            **_SPECIAL_TOKENS,
        }
    # Without it transformers gives texts longer than the position table to the model
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
