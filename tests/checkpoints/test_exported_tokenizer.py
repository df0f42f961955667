"""Texts become the same ids in transformers as in our instances, from the exported folder alone."""

import json

import pytest
from byte_tokenizers import LINES, SPECIAL_IDS, ours, roberta
from reference import import_reference
from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel, RobertaProcessing, Sequence, TemplateProcessing

from bert_packed.checkpoints.export_formats import write_tokenizer
from bert_packed.text import byte_bpe, tokenization
from bert_packed.text.vocabularies import encoder_ids

PIECES = [
    *("cafe", "café", "Café", "##s", "mask", "MASK", "cls", "[", "]", "the", "中", "文", "a", "##b", "!"),
    *("\u2028", "é", "e", "##e", "\U0001f600", "x", "##x", "##\u0301", "ß", "ss", "##ss", "i", "##\u0307"),
]
TEXTS = [
    "cafés the café Café CAFÉS",
    "e\u0301 cafe\u0301 x\u0301",  # an accent as a separate character
    "中文 the中文 \U00020000",
    "a\x00b\x07 a\tb\r\nthe",  # control characters: some are left out, some are spaces
    "\U0001f600 the \U0001f600a \U0001f468\u200d\U0001f469",
    "a\u2028b a\u200bb \ufeff a\u00a0b \u3000 \ufffd",
    "ß İ ﬁ the!the",
    "x" * 100,
    "x" * 101,
    "",
    "  ",
]
SPECIAL_TEXTS = ["[MASK] the", "the [mask] [CLS]", "[SEP][MASK]", "[UNK] [PAD]"]


@pytest.fixture(scope="module", params=[True, False], ids=["lower", "cased"])
def tokenizers(request, tmp_path_factory):
    _, transformers = import_reference()
    folder = tmp_path_factory.mktemp("hf")
    vocabulary = tokenization.Vocabulary((*tokenization.SPECIAL_TOKENS, *PIECES))
    tokenization.save_vocab(vocabulary, folder / "given.txt")
    (folder / "hf").mkdir()
    write_tokenizer(folder / "hf", str(folder / "given.txt"), do_lower_case=request.param, max_length=24)
    (folder / "hf" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    ours = tokenization.make_tokenizer(vocabulary, request.param)
    return ours, transformers.AutoTokenizer.from_pretrained(folder / "hf"), folder


@pytest.mark.parametrize("text", TEXTS + SPECIAL_TEXTS)
def test_ids_of_odd_texts(tokenizers, text):
    ours, theirs, folder = tokenizers
    want = tokenization.encode_sentences(ours, [text])[0]
    options = {"add_special_tokens": False, "verbose": False}
    assert theirs(text, split_special_tokens=True, **options)["input_ids"] == want
    # Others read `tokenizer.json` alone: transformers takes the rules of case from the other file
    alone = Tokenizer.from_file(str(folder / "hf" / "tokenizer.json"))
    alone.encode_special_tokens = True
    assert alone.encode(text, add_special_tokens=False).ids == want
    if text in TEXTS:
        assert theirs(text, **options)["input_ids"] == want


def test_a_mask_token_in_a_text_becomes_one(tokenizers):
    _, theirs, _ = tokenizers
    the = theirs.convert_tokens_to_ids("the")
    assert theirs("the [MASK] the")["input_ids"] == [2, the, 4, the, 3]
    assert (theirs.mask_token_id, theirs.pad_token_id, theirs.unk_token_id) == (4, 0, 1)


def test_pairs_lengths_and_text_again(tokenizers):
    _, theirs, _ = tokenizers
    pair = theirs("the", "a the", max_length=24, padding="max_length")
    assert pair["input_ids"][:8] == [2, *theirs.convert_tokens_to_ids(["the", "[SEP]", "a", "the"]), 3, 0, 0]
    assert pair["token_type_ids"][:8] == [0, 0, 0, 1, 1, 1, 0, 0]
    assert pair["attention_mask"] == [1] * 6 + [0] * 18
    assert theirs.model_max_length == 24
    assert len(theirs("the " * 50, truncation=True)["input_ids"]) == 24
    assert theirs.decode(theirs("cafes the xx")["input_ids"], skip_special_tokens=True) == "cafes the xx"


def test_the_given_vocabulary_is_copied(tokenizers):
    folder = tokenizers[2]
    assert (folder / "hf" / "vocab.txt").read_bytes() == (folder / "given.txt").read_bytes()
    written = sorted(path.name for path in (folder / "hf").iterdir())
    assert written == ["config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]


@pytest.mark.parametrize("is_lower", [True, False])
@pytest.mark.parametrize("is_cased", [True, False])
def test_both_files_say_whether_case_and_accents_go(tmp_path, is_lower, is_cased):
    words = ["Café", "cafe"] if is_cased else ["cafe"]
    tokenization.save_vocab(
        tokenization.Vocabulary((*tokenization.SPECIAL_TOKENS, *words)), tmp_path / "given.txt"
    )
    write_tokenizer(tmp_path, str(tmp_path / "given.txt"), do_lower_case=is_lower)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["do_lower_case"] is settings["strip_accents"] is is_lower
    assert settings["tokenize_chinese_chars"] is True and "model_max_length" not in settings
    normalizer = json.loads((tmp_path / "tokenizer.json").read_text())["normalizer"]
    assert normalizer["lowercase"] is normalizer["strip_accents"] is is_lower
    pieces = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("Café").tokens
    assert pieces == ["[CLS]", "cafe" if is_lower else "Café" if is_cased else "[UNK]", "[SEP]"]


# ---- tokens of bytes

_NO_TEMPLATE = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])


@pytest.mark.parametrize("name", ["ours", "roberta"])
@pytest.mark.parametrize(
    ("processor", "first"),
    [
        (None, (0, 5)),
        (RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False), (0, 5)),
        (RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=True), (0, 5)),
        (RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False), (1, 5)),
        (ByteLevel(add_prefix_space=False, trim_offsets=True), (1, 5)),
        (Sequence([ByteLevel(add_prefix_space=False, trim_offsets=True), _NO_TEMPLATE]), (1, 5)),
    ],
)
def test_texts_and_pairs_of_bytes_are_those_of_the_training(tmp_path, name, processor, first):
    """Though the file has no template, or RoBERTa's `<s> a </s> </s> b </s>`; places are the file's."""
    start, end = SPECIAL_IDS[name][:2]
    given = {"ours": ours, "roberta": roberta}[name]()
    if processor:
        given.post_processor = processor
    byte_bpe.save(given, tmp_path / "given.json")
    write_tokenizer(tmp_path, tmp_path / "given.json", True, ids=encoder_ids(tmp_path / "given.json"))
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    one, two = given.encode_batch(LINES[:2], add_special_tokens=False)
    single, pair = found.encode(LINES[0]), found.encode(*LINES[:2])
    assert single.ids == [start, *one.ids, end]
    assert pair.ids == [start, *one.ids, end, *two.ids, end]
    assert pair.offsets == [(0, 0), *one.offsets, (0, 0), *two.offsets, (0, 0)]
    spaced = found.encode(" cats", add_special_tokens=False)
    assert (spaced.offsets[0][0], spaced.offsets[-1][1]) == first
