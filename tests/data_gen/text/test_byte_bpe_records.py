"""Masked records of byte-level BPE: the whole text, special tokens by name, whole words, fresh masks."""

import re
from itertools import pairwise

import numpy as np
import pytest
from byte_tokenizers import SPECIAL_IDS, TOKENIZERS
from text_files import read_split, restore
from unpacked_records import read_packs

from bert_packed import schema
from bert_packed.data.dynamic_masking import DynamicMasking
from bert_packed.objectives.features import BATCH_NAMES
from bert_packed.records import provenance
from bert_packed.text import byte_bpe
from bert_packed.text.masking import MaskingRules
from bert_packed.text.vocabularies import load_maskable
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.text import create_job
from data_gen.text.create_config import CreateConfig
from data_gen.verification import compare_files

NUM_DOCUMENTS, LENGTH, PROBABILITY = 40, 48, 0.3


def write_text(path):
    """Documents of lines, which begin with the numbers of document and line: list of str."""
    rng = np.random.default_rng(0)
    words = ["The", "cats'", "packs,", "of", "", "packs;", "naïvely", "(packed)!", "12", "🐈"]
    documents = [
        "\n".join(f"doc{i} {n} " + " ".join(rng.choice(words, 1 + n % 5)) for n in range(1 + i % 12))
        for i in range(NUM_DOCUMENTS)
    ]
    path.write_text("\n\n".join(documents))
    return documents


def make(folder, name, output_dir, **settings):
    byte_bpe.save(TOKENIZERS[name](), folder / "given.json")
    given = {"vocab_file": str(folder / "given.json"), "max_seq_length": LENGTH, "dupe_factor": 1}
    given |= {"masked_lm_prob": PROBABILITY, "num_workers": 1, "num_shards": 2, "provenance": True}
    given |= {"input_file": str(folder / "text.txt"), "objective": "mlm", "tokenizer": "byte_bpe"}
    return create_job.create(CreateConfig(output_dir=str(output_dir), **{**given, **settings}))


def sequences_of(folder):
    """Unpacked records as triples: tokens that are masked, tokens as they were, positions of predictions."""
    features = read_split(folder, "train", LENGTH, num_predictions=15)
    whole, found = restore(features), []
    for row, size in enumerate(features[schema.INPUT_MASK].sum(axis=1)):
        places = features[schema.MASKED_LM_POSITIONS][row, features[schema.MASKED_LM_WEIGHTS][row] > 0]
        found.append((features[schema.INPUT_IDS][row, :size], whole[row, :size], places))
    return found


@pytest.fixture(scope="module", params=TOKENIZERS)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    documents = write_text(folder / "text.txt")
    return request.param, folder, documents, make(folder, request.param, folder / "instances")


def test_records_hold_the_text_between_special_tokens(made):
    """Documents are as the file has them, cut after lines, and each sequence but the last is full."""
    name, folder, documents, manifest = made
    tokenizer = byte_bpe.load(folder / "given.json").tokenizer
    ends_line = load_maskable(folder / "given.json").ends_line
    start, end, *_ = SPECIAL_IDS[name]
    found = sequences_of(folder / "instances")
    assert {(whole[0], whole[-1]) for _, whole, _ in found} == {(start, end)}
    by_document = [{} for _ in documents]
    for _, whole, _ in found:
        text = decode(tokenizer, whole[1:-1])
        document, line = re.match(r"doc(\d+) (\d+) ", text).groups()
        by_document[int(document)][int(line)] = text, whole[1:-1].tolist()
    assert sum(map(len, by_document)) == len(found) > NUM_DOCUMENTS + 10
    for text, pieces in zip(documents, by_document, strict=True):
        texts, ids = zip(*(pieces[line] for line in sorted(pieces)), strict=True)
        assert "".join(texts) == (tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text)
        assert all(one[-1] == "\n" for one in texts[:-1])
        for one, other in pairwise(ids):
            next_line = next(byte_bpe.split_lines(other, ends_line))
            assert len(one) + 2 <= LENGTH < len(one) + len(next_line) + 2
    assert manifest["splits"]["train"]["num_tokens_cut"] == 0
    assert (manifest["objective"], manifest["tokenizer"]) == ("mlm", "byte_bpe")
    assert (folder / "instances/tokenizer.json").read_bytes() == (folder / "given.json").read_bytes()


def test_masks_and_labels_are_of_this_vocabulary(made):
    name, folder, *_ = made
    start, end, mask, _ = SPECIAL_IDS[name]
    masked, whole, places = zip(*sequences_of(folder / "instances"), strict=True)
    sizes, predictions = (np.array([len(one) for one in some]) for some in (masked, places))
    assert abs(predictions - PROBABILITY * sizes).max() <= 0.5
    hidden, labels = (
        np.concatenate([ids[at] for ids, at in zip(some, places, strict=True)]) for some in (masked, whole)
    )
    assert 0.75 < np.mean(hidden == mask) < 0.85 and not np.isin(labels, [start, end, mask]).any()
    drawn = hidden[(hidden != mask) & (hidden != labels)]
    ordinary = load_maskable(folder / "given.json").ordinary_ids
    assert len(drawn) > 20 and np.isin(drawn, ordinary).all()


def decode(tokenizer, ids):
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def are_whole(tokenizer, whole, places):
    """True if predictions are of whole words, by the tokenizer's offsets, or no word has so few tokens."""
    text = decode(tokenizer, whole)
    code = tokenizer.encode(text, add_special_tokens=False)
    assert code.ids == whole.tolist()
    word = np.cumsum([text[start].isspace() for start, _ in code.offsets])
    masked = np.isin(np.arange(len(whole)), places)
    _, sizes = np.unique(word, return_counts=True)
    return all(len({*one}) == 1 for one in np.split(masked, np.cumsum(sizes))[:-1]) or sizes.min() > len(
        places
    )


def test_a_share_is_masked_of_a_line_without_spaces(tmp_path):
    lines = ["猫犬鳥", "https://example.org/?q=12", "猫犬鳥猫", "doc12-packs/naïvely"]
    (tmp_path / "text.txt").write_text("\n\n".join(lines))
    make(tmp_path, "roberta", tmp_path / "words", do_whole_word_mask=True, num_shards=1)
    found = sequences_of(tmp_path / "words")
    sizes = [(len(whole), len(places)) for _, whole, places in found]
    assert len(sizes) == len(lines) and min(sizes)[0] < 15 + 2  # of one word that P = 15 would hide whole
    assert [num for _, num in sizes] == [round(PROBABILITY * size) for size, _ in sizes]


def test_packs_are_verified_traced_and_masked_again(made):
    _, folder, *_ = made
    inputs = sorted(str(path) for path in (folder / "instances").glob("*.tfrecord"))
    given = {"max_seq_length": LENGTH * 2, "num_workers": 1, "num_shards": 1, "provenance": True}
    manifest = pack(PackConfig(input_file=",".join(inputs), output_dir=str(folder / "packed"), **given))
    assert manifest["packing_factor"] > 1.9 and manifest["tokenizer"] == "byte_bpe"
    (path,) = (folder / "packed").glob("*.tfrecord")
    assert compare_files(inputs, [str(path)], "error").is_good
    features = read_packs([str(path)])
    batch = {ours: features[theirs] for theirs, ours in BATCH_NAMES.items() if theirs in features}
    vocabulary = load_maskable(folder / "given.json")
    rules = MaskingRules(do_whole_word_mask=True)
    packs = np.arange(len(batch["token_ids"]))
    drawn = DynamicMasking(vocabulary, rules, 1).redraw(batch, 0 * packs, packs)
    tokenizer, texts = byte_bpe.load(folder / "given.json").tokenizer, []
    for row in packs:
        owners = drawn["prediction_sequences"][row].astype(int)
        whole, places = drawn["token_ids"][row].copy(), drawn["prediction_positions"][row]
        whole[places[owners > 0]] = drawn["prediction_ids"][row][owners > 0]
        for slot in np.unique(owners[owners > 0]):
            (own,) = np.nonzero(drawn["sequence_ids"][row] == slot)
            ids = whole[own[0] + 1 : own[-1]]
            assert are_whole(tokenizer, ids, places[owners == slot] - own[0] - 1)
            texts.append(decode(tokenizer, ids))
    assert sorted(texts) == sorted(
        decode(tokenizer, whole[1:-1]) for _, whole, _ in sequences_of(folder / "instances")
    )
    traced = provenance.find_documents(provenance.find_sources(str(path), 1))
    assert len(traced) == batch["sequence_ids"][0].max() > 1
    assert [text.split(" ")[0] for text in texts[: len(traced)]] == [f"doc{d.number - 1}" for d in traced]
