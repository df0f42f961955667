"""Byte-level tokenizers of encoders, trained on a little text: ours, and two with other special ids."""

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import RobertaProcessing
from tokenizers.trainers import BpeTrainer

from bert_packed.text import byte_bpe
from bert_packed.text.vocabularies import load_text_tokenizer

NORMALIZERS = {
    "none": None,
    "nfc": normalizers.NFC(),
    "nfd": normalizers.NFD(),
    "nfkc": normalizers.NFKC(),
    "uncased": normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]),
    "strip": normalizers.Strip(),
    "one_space": normalizers.Replace("  ", " "),
}
LINES = [
    "The cats' 12 packs, naïvely (so to speak) packed: a don't, an  isn't.",
    "\tdef pack(lengths):  # 3.14 packs\n        return [packs for packs in lengths if packs]",
    "Zwölf Boxkämpfer jagen 猫 über den großen Sylter Deich 🐈‍⬛!",
    "Packs of packs of packs\nof cats.\n\nAnd  3   cats more.",
]


def ours():
    return byte_bpe.train([LINES], 330, is_encoder=True)


def with_normalizer(name):
    """Ours, with one of `NORMALIZERS`."""
    tokenizer = ours()
    if NORMALIZERS[name]:
        tokenizer.normalizer = NORMALIZERS[name]
    return tokenizer


def load(folder, tokenizer):
    """The tokenizer of a folder in which another is saved."""
    byte_bpe.save(tokenizer, folder / "tokenizer.json")
    return load_text_tokenizer(folder / "tokenizer.json", do_lower_case=True)


def roberta(vocab_size=330):
    """<s> is id 0, which is padding in records, and <mask> 4."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False)
    return tokenizer


def modern_bert():
    """Special tokens after all others, <|endoftext|> among them, and runs of spaces that are tokens."""
    tokenizer = byte_bpe.train([LINES], 320)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(" " * number, normalized=True) for number in (4, 3, 2)])
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"])
    tokenizer.add_tokens(["[unused0]"])
    return tokenizer


TOKENIZERS = {"ours": ours, "roberta": roberta, "modern_bert": modern_bert}
# The ids open, close, mask and pad
SPECIAL_IDS = {"ours": [1, 2, 3, 0], "roberta": [0, 2, 4, 1], "modern_bert": [287, 288, 290, 289]}
