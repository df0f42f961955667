"""Documents become pieces with every token's next as label: no text is lost, no byte counted twice."""

import dataclasses
import gzip
import itertools
import json

import pytest
from causal_files import read_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from bert_packed import schema
from bert_packed.records.provenance import find_documents
from bert_packed.text import byte_bpe, tokenization
from data_gen.text import corpus, create_job
from data_gen.text.create_config import CreateConfig
from data_gen.text.text_records import count_bytes, encode_texts
from data_gen.text.token_corpus import STREAMS, open_corpus, write_corpus

LINES = [
    "Übergrößen kosten 5 € — nicht 3.",
    "   An indented line,  with two spaces\tand a tab. ",
    "日本語のテキスト 🙂🙂 and e\u0301.",
    "A page about <|endoftext|> and [SEP] does not end here.",
]
DOCUMENTS = ["\n".join(LINES), "One line.", "x", "\n".join(LINES[::-1] * 3)]
TRAINED = byte_bpe.train([DOCUMENTS * 3, ["and then some more text and so on"]], 300)
BPE = dataclasses.replace(byte_bpe.DocumentTokenizer(TRAINED, 0, 0, 300))
BPE.tokenizer.encode_special_tokens = True
WORDS = tokenization.Vocabulary((*tokenization.SPECIAL_TOKENS, *"abcdefgh", *(f"##{c}" for c in "abcdefgh")))
WORDPIECE = byte_bpe.DocumentTokenizer(tokenization.make_tokenizer(WORDS, True), 2, 3, len(WORDS))


def encode(texts, tokenizer, folder):
    """`TokenCorpus` of texts, (number, text)."""
    folder.mkdir(exist_ok=True)
    write_corpus(encode_texts(texts, tokenizer), STREAMS, folder, 0)
    return open_corpus(folder, STREAMS)


def documents_of(streams):
    """The documents of a corpus: list of (ids, bytes of each)."""
    starts = streams.sentence_offsets[streams.document_offsets].tolist()
    return [
        (streams.token_ids[first:last].tolist(), streams.token_bytes[first:last].tolist())
        for first, last in itertools.pairwise(starts)
    ]


def make(folder, input_file, **changed):
    given = {"objective": "causal_lm", "max_seq_length": 16, "num_workers": 1, "num_shards": 3, **changed}
    return create_job.create(CreateConfig(input_file=str(input_file), output_dir=str(folder), **given))


# Bytes of a token


@given(text=st.text(max_size=60))
@settings(deadline=None, max_examples=100)
@pytest.mark.parametrize("tokenizer", [BPE, WORDPIECE], ids=["byte_bpe", "wordpiece"])
def test_every_byte_is_counted_once(tokenizer, text):
    text = text.encode("utf-8", "replace").decode()
    code = tokenizer.tokenizer.encode(text, add_special_tokens=False)
    num_bytes, rest = count_bytes(text, [end for _, end in code.offsets])
    assert (num_bytes >= 0).all() and rest >= 0
    assert num_bytes.sum() + rest == len(text.encode())


@pytest.mark.parametrize("tokenizer", [BPE, WORDPIECE], ids=["byte_bpe", "wordpiece"])
@pytest.mark.parametrize("most_characters", [1, 40, 10**6])
def test_documents_in_pieces_keep_all_bytes(tmp_path, tokenizer, most_characters):
    lines = [(number, line) for number, text in enumerate(DOCUMENTS) for line in text.split("\n")]
    streams = encode(corpus.join_lines(lines, most_characters), tokenizer, tmp_path)
    found = documents_of(streams)
    texts = [text for text in DOCUMENTS if tokenizer.tokenizer.encode(text).ids]
    assert [sum(num_bytes) for _, num_bytes in found] == [len(text.encode()) for text in texts]
    assert all(ids[0] == tokenizer.start_id and ids[-1] == tokenizer.end_id for ids, _ in found)
    assert all(num_bytes[0] == 0 for _, num_bytes in found)
    if most_characters == 10**6:  # as whoever tokenizes the whole document gets them
        whole = [tokenizer.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        assert [ids[1:-1] for ids, _ in found] == whole


# Training, and tokenizers of others


def test_a_tokenizer_of_others(tmp_path):
    """It is like GPT-NeoX's: NFC, ids in another order, and a template that would add tokens."""
    words = {"a": 0, "b": 1, "é": 2, "</s>": 3, "<s>": 7}
    other = Tokenizer(models.WordLevel(words, unk_token="a"))
    other.normalizer = normalizers.NFC()
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    other.add_special_tokens(["<s>", "</s>"])
    other.enable_truncation(2)
    other.enable_padding(length=9)
    other.save(str(tmp_path / "other.json"))
    loaded = byte_bpe.load(tmp_path / "other.json")
    assert (loaded.start_id, loaded.end_id, loaded.vocab_size) == (7, 3, 8)
    ((ids, num_bytes),) = documents_of(encode([(1, "a e\u0301 b a ")], loaded, tmp_path / "out"))
    assert ids == [7, 0, 2, 1, 0, 3]
    # bytes are of the text before normalization: the accent, which "é" leaves behind, goes to "b"
    assert num_bytes == [0, 1, 2, 4, 2, 1]


# Text with its spaces


@pytest.mark.parametrize("name", ["text.txt", "text.txt.gz", "text.jsonl", "paragraphs.jsonl"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_text_is_read_verbatim(tmp_path, name, line_end):
    if name.endswith(".jsonl"):
        key = name.partition(".")[0]
        texts = [*DOCUMENTS[:1], "", " \n", *DOCUMENTS[1:]]
        values = texts if key == "text" else [text.split("\n") for text in texts]
        content = "\n".join(json.dumps({key: value}) for value in values)
        numbers = [1, 4, 5, 6]
    else:
        content = "\n\n \n".join(DOCUMENTS).replace("\n", line_end)
        numbers = [1, 2, 3, 4]
    raw = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    found = list(corpus.TextDocuments((str(tmp_path / name),), True))
    assert found == list(zip(numbers, DOCUMENTS, strict=True))
    pieces = {}
    for number, piece in corpus.read_texts([str(tmp_path / name)], 10):
        pieces.setdefault(number, []).append(piece)
    assert ["".join(some) for some in pieces.values()] == DOCUMENTS


# Records


def check_document(pieces, ids, num_bytes, length):
    """Pieces of a document against the tokens of all of it, with those around them, and their bytes."""
    num_pieces = -(-(len(ids) - 1) // length)
    assert len(pieces) == num_pieces
    for number, piece in enumerate(sorted(pieces, key=lambda piece: ids.index(piece[schema.INPUT_IDS][0]))):
        first, last = number * length, min((number + 1) * length, len(ids))
        labels, label_bytes = [*ids[first + 1 : last + 1]], [*num_bytes[first + 1 : last + 1]]
        at_end = [0] * (last - first - len(labels))
        assert len(at_end) == (number == num_pieces - 1 and last == len(ids))
        assert piece[schema.INPUT_IDS] == ids[first:last]
        assert piece[schema.LABEL_IDS] == labels + at_end
        assert piece[schema.LABEL_MASK] == [1] * len(labels) + at_end
        assert piece[schema.LABEL_BYTES] == label_bytes + at_end
        assert piece[schema.NUM_BYTES] == [sum(label_bytes)]


@pytest.mark.parametrize("length", [8, 9, 64])
def test_pieces_of_documents_by_a_plain_loop(tmp_path, length):
    """Documents of all lengths about the pieces', one of which would end in a piece of its end alone."""
    letters = [f"w{i}" for i in range(600)]
    sizes = [1, length - 3, length - 2, length - 1, length, 2 * length - 2, 2 * length - 1]
    words = iter(letters)  # no word twice, so that a piece says where it is from
    documents = [" ".join(next(words) for _ in range(size)) for size in sizes]
    (tmp_path / "words.txt").write_text("\n".join([*tokenization.SPECIAL_TOKENS, *letters]))
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    given = {"max_seq_length": length, "vocab_file": str(tmp_path / "words.txt"), "provenance": True}
    manifest = make(tmp_path / "out", tmp_path / "text.txt", **given)
    paths = sorted((tmp_path / "out").glob("train-*.tfrecord"))
    by_document = {}
    for path in paths:
        records = read_examples([path])
        origins = find_documents([(str(path), number + 1) for number in range(len(records))])
        for origin, record in zip(origins, records, strict=True):
            by_document.setdefault(origin.number, []).append(record)
    assert sorted(by_document) == list(range(1, len(documents) + 1))
    for number, document in enumerate(documents, 1):
        split = document.split(" ")
        ids = [2, *(5 + letters.index(word) for word in split), 3]
        # a word counts with the space before it
        num_bytes = [0, *(len(word) + (place > 0) for place, word in enumerate(split)), 0]
        check_document(by_document[number], ids, num_bytes, length)
    content = manifest["splits"]["train"]
    assert content["num_bytes"] == sum(len(document) for document in documents)
    assert content["num_predictions"] == sum(size + 1 for size in sizes)
    assert content["num_sequences"] == sum(map(len, by_document.values()))
    assert manifest["objective"] == "causal_lm" and manifest["vocab_size"] == 605
