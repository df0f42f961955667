"""A tiny encoder on disk with its vocabulary, and texts for it."""

import json

from tiny import CONFIG, make_engine

from bert_packed.checkpoints import checkpoint
from bert_packed.text.tokenization import SPECIAL_TOKENS

WORDS = [f"w{number}" for number in range(26)]
TEXTS = [" ".join(WORDS[start : start + length]) for start, length in enumerate([3, 0, 9, 1, 22, 5, 2, 8, 4])]


def write_encoder(folder, config=CONFIG):
    """Write weights, `bert_config.json` and `vocab.txt` into `folder`; returns it."""
    checkpoint.save_weights(folder, make_engine(config=config).weights(), config)
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    return folder


def write_json_lines(path, names, rows):
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return str(path)


def write_beir(folder, texts="abc", queries="ab", relevant=(("1", "a", 2), ("1", "c", 1), ("2", "b", 1))):
    """Write a folder in BEIR's form; the id of a document is its text, that of a query its number."""
    (folder / "qrels").mkdir(parents=True)
    write_json_lines(folder / "corpus.jsonl", ("_id", "title", "text"), [(text, "", text) for text in texts])
    numbered = [(str(number), text) for number, text in enumerate(queries, 1)]
    write_json_lines(folder / "queries.jsonl", ("_id", "text"), numbered)
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in relevant)]
    (folder / "qrels" / "test.tsv").write_text("".join(f"{line}\n" for line in lines))
    return folder
