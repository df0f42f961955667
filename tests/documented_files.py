"""Small input files for the commands of the pages: texts, tables, tasks, and a checkpoint of Google's."""

import dataclasses
import json

import datasets
import numpy as np
from causal_files import write_sequences
from foreign_checkpoints import ONE_LAYER, google_tensors, write_google
from packs import VOCAB_SIZE
from squad_files import CONTEXT, entry, write

from bert_packed.text.tokenization import SPECIAL_TOKENS

WORDS = [f"{first}{second}" for first in "bdfgk" for second in "aeiou"]
GOOGLE_LENGTH = 128
NUM_DOCUMENTS = 30
LONGEST = {"inputs": 300, "targets": 60}  # tokens of T5's records


def make_documents():
    """Documents, lists of sentences, of which a pack holds few: an audit computes each sequence alone."""
    rng = np.random.default_rng(0)
    return [
        [" ".join(rng.choice(WORDS, rng.integers(3, 25))) + "." for _ in range(rng.integers(2, 9))]
        for _ in range(NUM_DOCUMENTS)
    ]


def write_files(folder):
    """Write everything into a folder."""
    documents = make_documents()
    rows = datasets.Dataset.from_dict({"text": [" ".join(sentences) for sentences in documents]})
    for name in ("my_text", "text", "wiki", "books", "conll", "pairs", "glue/MRPC", "glue/SST-2"):
        (folder / name).mkdir(parents=True)
    for name in ("my_text/a.txt", "books/a.txt"):
        (folder / name).write_text("\n\n".join("\n".join(sentences) for sentences in documents) + "\n")
    for name in ("my_text.jsonl", "text/a.jsonl", "news.jsonl"):
        rows.to_json(folder / name)
    rows.to_parquet(folder / "wiki/a.parquet")
    rows.save_to_disk(folder / "news/train")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS, "."]) + "\n")
    write_tasks(folder)
    write_pairs(folder / "pairs/a.tfrecord")
    tensors = google_tensors()
    name = "bert/embeddings/position_embeddings"
    tensors[name] = np.resize(tensors[name], (GOOGLE_LENGTH, ONE_LAYER.hidden_size))
    config = dataclasses.replace(ONE_LAYER, max_position_embeddings=GOOGLE_LENGTH)
    write_google(folder / "uncased", tensors, config)
    vocabulary = [*SPECIAL_TOKENS, *WORDS, "."]
    (folder / "uncased/vocab.txt").write_text("\n".join(vocabulary[:VOCAB_SIZE]) + "\n")


def write_tasks(folder):
    """SQuAD, its predictions, pairs of sentences, CoNLL and two tasks of GLUE."""
    answers = {"first": "Ada Lovelace", "then": "1843", "computed": "Bernoulli numbers"}
    entries = tuple(
        entry(f"q{number}", f"What is {word}?", answers[word]) for number, word in enumerate(answers)
    )
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        write(folder / name, (CONTEXT, entries))
    labels = [f"{word} {other},{kind}" for word, other, kind in (("ba", "be", "x"), ("bi", "bo", "y"))]
    for name in ("train.csv", "dev.csv"):
        (folder / name).write_text("\n".join(["text,label", *labels]) + "\n")
    pairs = zip(make_documents(), make_documents()[1:], strict=False)
    lines = [json.dumps({"anchor": one[0], "positive": other[1]}) for one, other in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "predictions.json").write_text(json.dumps({"q0": "Ada", "q1": "1843", "q2": ""}))
    sentence = "ba O\nbe B-PER\nbi I-PER\n\nbo O\nbu B-LOC\n\n"
    for split in ("train", "valid"):
        (folder / f"conll/{split}.txt").write_text(4 * sentence)
    pairs = "".join(f"{label}\t1\t2\tba be {label}\tbo bu\n" for label in (0, 1))
    mrpc = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + 4 * pairs
    sst2 = "sentence\tlabel\n" + 4 * "ba be\t1\nbo bu\t0\n"
    for split in ("train", "dev"):
        (folder / f"glue/MRPC/{split}.tsv").write_text(mrpc)
        (folder / f"glue/SST-2/{split}.tsv").write_text(sst2)


def write_pairs(path):
    """Records of T5's form: `inputs` and `targets`, of varying lengths."""
    rng = np.random.default_rng(0)
    records = []
    for _ in range(20):
        records.append({name: rng.integers(1, 99, rng.integers(1, most)) for name, most in LONGEST.items()})
    write_sequences(path, records)
