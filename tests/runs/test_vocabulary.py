"""The vocabulary that a fine-tuning takes, and refusals of one that its model did not learn."""

import dataclasses
import json
import re

import pytest
from byte_tokenizers import ours, roberta
from modern_bert_models import CONFIG as MODERN_BERT
from tiny import CONFIG
from tokenizers import normalizers

from bert_packed.checkpoints.export_formats import write_tokenizer
from bert_packed.core.settings import InputError
from bert_packed.core.storage import file_sha256
from bert_packed.runs import vocabulary
from bert_packed.tasks import run as finetuning
from bert_packed.tasks.config import FinetuneConfig
from bert_packed.text import byte_bpe, tokenization


def config(**settings):
    return FinetuneConfig(**{"output_dir": "x", **{name: str(value) for name, value in settings.items()}})


@pytest.fixture
def run(tmp_path):
    """A run that was trained with cased texts, and its vocabulary; another one of the same size."""
    for name in ("vocab.txt", "other.txt"):
        (tmp_path / name).write_text(name)
    facts = {"flags": {"do_lower_case": False}, "data": {"vocab_sha256": file_sha256(tmp_path / "vocab.txt")}}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    (tmp_path / "checkpoint-4").mkdir()
    return tmp_path


def test_the_vocabulary_beside_a_checkpoint_is_found(run):
    (run / "bert_model.ckpt.index").touch()
    for start in (run, run / "checkpoint-4", run / "bert_model.ckpt"):
        assert vocabulary.find_vocab(start, "", CONFIG) == run / "vocab.txt"
    assert vocabulary.find_vocab(run, run / "other.txt", CONFIG) == run / "other.txt"
    # But a whole model has its own
    (run / "model").mkdir()
    with pytest.raises(InputError, match=r"`vocab_file` must be given where no vocab\.txt"):
        vocabulary.find_vocab(run / "model", "", CONFIG)


def test_the_vocabulary_of_the_models_size_wins(tmp_path):
    def find(vocab_size):
        return vocabulary.find_vocab(tmp_path, "", dataclasses.replace(MODERN_BERT, vocab_size=vocab_size))

    words, bytes_ = tmp_path / "vocab.txt", tmp_path / "tokenizer.json"
    (tmp_path / "given.txt").write_text("\n".join([*tokenization.SPECIAL_TOKENS, "a"]))
    # Our exports have both files, with equal WordPieces: the plain one is for a model of any size
    write_tokenizer(tmp_path, tmp_path / "given.txt", do_lower_case=True)
    assert [find(vocab_size) for vocab_size in (6, 4096)] == [words] * 2
    byte_bpe.save(roberta(), bytes_)
    assert [find(vocab_size) for vocab_size in (6, 8, 330, 336)] == [words, words, bytes_, bytes_]
    for vocab_size in (329, 458):
        message = (
            f"must have a vocabulary of its vocab_size={vocab_size} where no `vocab_file` is given. "
            f"Received: {words}, of 6 and {bytes_}, of 330."
        )
        with pytest.raises(InputError, match=re.escape(message)):
            find(vocab_size)


@pytest.mark.parametrize("name", ["", "checkpoint-4"])
def test_texts_are_read_as_in_the_training(run, name):
    start = run / name
    cased = dataclasses.replace(config(init_checkpoint=start), do_lower_case=False)
    vocabulary.check_as_trained(cased, run / "vocab.txt")
    with pytest.raises(InputError, match=r"`do_lower_case` must be as .* False by .*run\.json"):
        vocabulary.check_as_trained(dataclasses.replace(cased, do_lower_case=True), run / "vocab.txt")
    with pytest.raises(InputError, match=r"`vocab_file` must be the one .* another one"):
        vocabulary.check_as_trained(cased, run / "other.txt")


def test_texts_have_the_case_of_a_folder_of_hugging_face(tmp_path, monkeypatch):
    (tmp_path / "vocab.txt").touch()
    uncased, cased = config(init_checkpoint=tmp_path), {"do_lower_case": False}
    vocabulary.check_as_trained(uncased, tmp_path / "vocab.txt")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(cased))
    with pytest.raises(
        InputError, match=r"`do_lower_case` must be as .* False by .*/tokenizer_config\.json\. .*: True"
    ):
        vocabulary.check_as_trained(uncased, tmp_path / "vocab.txt")
    vocabulary.check_as_trained(dataclasses.replace(uncased, **cased), tmp_path / "vocab.txt")
    # Bytes have their own rule, and no checkpoint is not the working directory
    byte_bpe.save(ours(), tmp_path / "tokenizer.json")
    vocabulary.check_as_trained(uncased, tmp_path / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    vocabulary.check_as_trained(config(), tmp_path / "vocab.txt")


def test_a_fine_tuning_reads_as_the_run_that_it_starts_from(run, capsys):
    words = [*tokenization.SPECIAL_TOKENS, *(f"w{number}" for number in range(20))]
    (run / "other.txt").write_text("".join(f"{word}\n" for word in words))
    model = dataclasses.replace(CONFIG, vocab_size=len(words))
    (run / "bert_config.json").write_text(json.dumps(dataclasses.asdict(model)))
    training = config(
        init_checkpoint=run, vocab_file=run / "other.txt", bert_config_file=run / "bert_config.json"
    )
    training = dataclasses.replace(training, max_seq_length=8)
    with pytest.raises(InputError, match="`do_lower_case` must be as in the training"):
        finetuning.read_text_model(training)
    with pytest.raises(InputError, match="`vocab_file` must be the one that `init_checkpoint` was trained"):
        finetuning.read_text_model(dataclasses.replace(training, do_lower_case=False))
    (run / "run.json").write_text(json.dumps({"flags": {}}))  # of a pre-training that kept no vocabulary
    assert finetuning.read_text_model(training).config == model
    assert capsys.readouterr().out == (
        "batch      32 sequences a step (train_batch_size), packed or not\n"
        f"vocabulary {run / 'other.txt'}, {len(words)} WordPieces\n"
    )
    new = dataclasses.replace(training, init_checkpoint="", bert_config_file="bert-tiny")
    assert finetuning.read_text_model(new).config.vocab_size == len(words)
    long = dataclasses.replace(training, max_seq_length=CONFIG.max_position_embeddings + 1)
    with pytest.raises(InputError, match="`max_seq_length` must be at most max_position_embeddings"):
        finetuning.read_text_model(long)
    with pytest.raises(InputError, match="`bert_config_file` must be of a BERT"):
        finetuning.read_text_model(dataclasses.replace(training, bert_config_file="mamba-tiny"))


def test_rows_that_round_a_vocabulary_up():
    describe, model = vocabulary.describe_vocabulary, dataclasses.replace(CONFIG, vocab_size=30528)
    assert describe("v", 30528, model, True) == "vocabulary v, 30,528 WordPieces"
    padded = describe("v", 30522, model, True)
    assert padded.endswith("30,522 WordPieces; the model has 6 more rows, which no text uses")
    for rows, size, is_padding in ((128, 100, True), (128, 1, True), (136, 8, False), (100, 98, False)):
        model = dataclasses.replace(CONFIG, vocab_size=rows)
        if is_padding:
            assert f"has {rows - size} more rows" in describe("v", size, model, True)
        else:
            with pytest.raises(InputError, match=f"of its vocab_size={rows}. Received: v, of {size}"):
                describe("v", size, model, True)
        assert "more rows" in describe("v", size, model, False)


def records_of(path):
    return vocabulary.RecordsVocabulary(str(path), path.read_bytes(), 5, None)


def test_a_start_on_records_of_word_pieces(tmp_path):
    """A BERT of Hugging Face may have its WordPieces in a tokenizer.json alone."""
    (tmp_path / "vocab.txt").write_text("\n".join([*tokenization.SPECIAL_TOKENS, "a"]))
    records, start = records_of(tmp_path / "vocab.txt"), tmp_path / "start"
    start.mkdir()
    byte_bpe.save(ours(), start / "tokenizer.json")
    vocabulary.check_start(start, CONFIG, records)
    with pytest.raises(
        InputError, match=r"`init_checkpoint` must have .*Received: .*tokenizer\.json, another"
    ):
        vocabulary.check_start(start, MODERN_BERT, records)
    # The file of the same name counts before that file, beside a checkpoint too; line ends do not
    (start / "run.json").write_text("{}")
    (start / "checkpoint-2").mkdir()
    tokens = (tmp_path / "vocab.txt").read_text().split()
    for place in (start, start / "checkpoint-2"):
        (start / "vocab.txt").write_text("\r\n".join(tokens))
        vocabulary.check_start(place, MODERN_BERT, records)
        (start / "vocab.txt").write_text("\n".join([*tokens[:-2], tokens[-1], tokens[-2]]) + "\n")
        with pytest.raises(InputError, match=r"Received: .*vocab\.txt, another one"):
            vocabulary.check_start(place, CONFIG, records)


def join_merges(content):
    """Write merges as older versions of `tokenizers` did."""
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]


def swap_merges(content):
    merges = content["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


@pytest.mark.parametrize(
    ("change", "is_equal"),
    [
        (join_merges, True),
        (lambda content: content.update(post_processor=None, truncation=None), True),
        (swap_merges, False),
        (lambda content: content.update(normalizer=json.loads(normalizers.NFC().__getstate__())), False),
        (lambda content: content["pre_tokenizer"].update(add_prefix_space=True), False),
        (lambda content: content["model"]["vocab"].update({"!": 6, '"': 5}), False),
    ],
)
def test_a_start_on_records_of_bytes(tmp_path, change, is_equal):
    """Its tokenizer gives every text the ids that the records have, whatever else is in the file."""
    content = json.loads(roberta().to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    change(content)
    (tmp_path / "start").mkdir()
    (tmp_path / "start/tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "start/vocab.txt").write_text("of a file of the same name none is asked")
    records = records_of(tmp_path / "tokenizer.json")
    if is_equal:
        return vocabulary.check_start(tmp_path / "start", MODERN_BERT, records)
    with pytest.raises(InputError, match="`init_checkpoint` must have the vocabulary of the records"):
        vocabulary.check_start(tmp_path / "start", MODERN_BERT, records)


def test_a_damaged_tokenizer_beside_a_start(tmp_path):
    byte_bpe.save(ours(), tmp_path / "tokenizer.json")
    (tmp_path / "start").mkdir()
    (tmp_path / "start/tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"`init_checkpoint` must be a tokenizer\.json, as `tokenizers`"):
        vocabulary.check_start(tmp_path / "start", MODERN_BERT, records_of(tmp_path / "tokenizer.json"))
