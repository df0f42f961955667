"""Byte-level vocabularies of encoders: special tokens by name, word starts and line ends by offsets."""

from itertools import chain

import numpy as np
import pytest
from byte_tokenizers import LINES, SPECIAL_IDS, TOKENIZERS, roberta
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bert_packed.core.settings import InputError
from bert_packed.text import byte_bpe, tokenization
from bert_packed.text.vocabularies import ByteBpe, WordPieces, load_maskable


@pytest.fixture(params=TOKENIZERS)
def case(request, tmp_path):
    path = str(tmp_path / "tokenizer.json")
    byte_bpe.save(TOKENIZERS[request.param](), path)
    return request.param, byte_bpe.load(path).tokenizer, load_maskable(path)


def test_special_tokens_are_found_by_their_names(case):
    name, tokenizer, found = case
    assert byte_bpe.find_encoder_tokens(tokenizer) == SPECIAL_IDS[name]
    assert [found.cls_id, found.sep_id, found.mask_id] == SPECIAL_IDS[name][:3]
    special = {"[UNK]", "<unk>", byte_bpe.END_OF_TEXT}.union(*byte_bpe.ENCODER_TOKENS)
    ids = tokenizer.get_vocab()
    assert found.ordinary_ids.tolist() == sorted({i for token, i in ids.items() if token not in special})
    assert len(found) == max(ids.values()) + 1
    # Special tokens within a text are text
    quoted = tokenizer.encode("[CLS]<s>[MASK]<mask></s>", add_special_tokens=False)
    assert not {*quoted.ids} & {*SPECIAL_IDS[name]}


def test_words_and_lines_are_those_of_the_offsets(case):
    """A token opens a word where the text has white space, and ends a line where it holds a line end."""
    _, tokenizer, found = case
    num_words = num_lines = 0
    for text in [*LINES, "\n".join(LINES)]:
        code = tokenizer.encode(text, add_special_tokens=False)
        text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        opens = [text[start].isspace() for start, _ in code.offsets]
        np.testing.assert_array_equal(~found.is_continuation[code.ids], opens)
        ends = ["\n" in text[start:end] for start, end in code.offsets]
        np.testing.assert_array_equal(found.ends_line[code.ids], ends)
        lines = list(byte_bpe.split_lines(code.ids, found.ends_line))
        assert [*chain(*lines)] == code.ids and len(lines) == sum(ends) + (not ends[-1])
        assert all(tokenizer.decode(line).rstrip(" \t").endswith("\n") for line in lines[:-1])
        num_words, num_lines = num_words + sum(opens), num_lines + len(lines)
    assert num_words > 60 and num_lines > 12


def test_equal_texts_give_equal_vocabularies(tmp_path):
    for name in ("one", "other"):
        ByteBpe(330, is_encoder=True).train([LINES], str(tmp_path / name))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    trained = Tokenizer.from_file(str(tmp_path / "one"))
    assert [trained.id_to_token(i) for i in range(4)] == ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    assert trained.encode("a", "b").tokens == ["[CLS]", "a", "[SEP]", "b", "[SEP]"]
    with pytest.raises(InputError, match=r"at least 260, for every byte and \[PAD\], .*Received: 259"):
        byte_bpe.train([LINES], 259, is_encoder=True)


ROBERTA = roberta().to_str()
WITHOUT_MASK = ROBERTA.replace("<mask>", "<other>")
# The packs, and what is encoded later, would have other tokens each time
WITH_DROPOUT = ROBERTA.replace('"dropout":null', '"dropout":0.1')
WORDS = Tokenizer(
    WordLevel({token: i for i, token in enumerate(tokenization.SPECIAL_TOKENS)}, "[UNK]")
).to_str()
ONE_WORD = Tokenizer(WordLevel({"<s>": 0}, "<s>")).to_str()
check_bytes, check_words = ByteBpe(0, is_encoder=True).check, WordPieces(0, True).check
BOTH = load_maskable, check_bytes


@pytest.mark.parametrize(
    ("content", "name", "readers", "message"),
    [
        (WITHOUT_MASK, "a.json", BOTH, r"must hold .*<mask>, <pad>, to mask tokens\."),
        (WORDS, "a.json", BOTH, r"must be byte-level BPE .*Received: .*, WordLevel, "),
        (WITH_DROPOUT, "a.json", (load_maskable, byte_bpe.load), r"no dropout.* with dropout=0\.1\.$"),
        (WORDS, "a.txt", (load_maskable,), r"one WordPiece a line, or end in \.json where it is byte"),
        (WORDS, "a.json", (check_words,), r"a tokenizer\.json is for --tokenizer=byte_bpe"),
        (ONE_WORD, "a.json", (byte_bpe.load,), "open and close a document"),
        ("", "a.txt", (check_bytes,), r"must be a tokenizer\.json, as `tokenizers` writes it"),
        ('{"model": 3}', "a.json", (ByteBpe(0).check,), r"must be a tokenizer\.json.*Received: .*/a\.json"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path, content, name, readers, message):
    (tmp_path / name).write_text(content)
    for read in readers:
        with pytest.raises(InputError, match=message):
            read(str(tmp_path / name))
