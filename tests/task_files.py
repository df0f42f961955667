"""Tiny data of the fine-tuning tasks, a start of each architecture, and the commands in this process."""

import dataclasses
import json

import numpy as np
import recorded_calls
from byte_tokenizers import LINES, ours, roberta
from modern_bert_models import CONFIG as MODERN_BERT
from squad_files import QUESTIONS, write
from tiny import CONFIG

from bert_packed import cli
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import MASKED_LM, PRETRAINING, config_json
from bert_packed.checkpoints import checkpoint
from bert_packed.tasks.glue.config import GlueConfig
from bert_packed.tasks.ner.config import NerConfig
from bert_packed.tasks.squad.config import SquadConfig
from bert_packed.text import byte_bpe, tokenization
from bert_packed.training.engines.engine import named_weights

LENGTH = 64
TASKS = {
    "squad": (cli.squad, SquadConfig),
    "glue": (cli.fine_tune, GlueConfig),
    "ner": (cli.fine_tune, NerConfig),
}
PREDICTIONS = {"squad": "predictions.json", "glue": "predictions.tsv", "ner": "predictions.txt"}
VOCABULARIES = {"bert": "vocab.txt", "modernbert": "tokenizer.json"}
TAGGED = {"O": ("the", "a", "saw", "went", "to"), "PER": ("ada", "bob"), "LOC": ("rome", "york")}


def write_conll(path, num_sentences, seed):
    """Write sentences, one of them longer than a pack, in which a word's kind is always the same."""
    rng = np.random.default_rng(seed)
    lines = ["-DOCSTART- -X- O", ""]
    for number in range(num_sentences):
        previous = "O"
        for _ in range(70 if number == 2 else rng.integers(1, 8)):
            kind = str(rng.choice(["O", "O", "PER", "LOC"]))
            tag = kind if kind == "O" else f"{'I' if kind == previous else 'B'}-{kind}"
            previous = kind
            lines.append(f"{rng.choice(TAGGED[kind])} X {tag}")
        lines.append("")
    path.write_text("\n".join(lines))


def write_tasks(folder):
    """Write data of all tasks, a checkpoint of each architecture beside its vocabulary, and other ones."""
    write(folder / "questions.json", *QUESTIONS)
    (folder / "RTE").mkdir()
    rows = [
        f"{number}\t{LINES[number % 4][:40].strip()!r}\t Packs of cats \t{('not_', '')[number % 2]}entailment"
        for number in range(12)
    ]
    for name in ("train.tsv", "dev.tsv"):
        (folder / "RTE" / name).write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n")
    write_conll(folder / "train.txt", 16, 0)
    write_conll(folder / "dev.txt", 8, 1)
    texts = [*LINES, *(text for context, entries in QUESTIONS for text in (context, *words_of(entries)))]
    vocabulary = tokenization.train_vocab([[*texts, *sum(TAGGED.values(), ())]], 400, do_lower_case=True)
    bert = dataclasses.replace(
        CONFIG, vocab_size=len(vocabulary), num_hidden_layers=1, max_position_embeddings=LENGTH
    )
    modern_bert = dataclasses.replace(
        MODERN_BERT,
        vocab_size=336,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
        classifier_pooling="mean",
    )
    for name, head, config in (("bert", PRETRAINING, bert), ("modernbert", MASKED_LM, modern_bert)):
        for start in (name, f"{name}-bare"):
            checkpoint.save_weights(folder / start, named_weights(build_model(head, config, 0)), config)
    (folder / "bert.json").write_text(json.dumps(config_json(bert)))
    tokenization.save_vocab(vocabulary, folder / "bert" / "vocab.txt")
    byte_bpe.save(ours(), folder / "modernbert" / "tokenizer.json")
    byte_bpe.save(roberta(), folder / "other.json")
    return folder


def words_of(entries):
    return [entry["question"] for entry in entries]


def flags_of(task, files, output_dir, architecture="bert", **changes):
    """Flags of a short run: dict."""
    given = {
        "init_checkpoint": files / architecture,
        "output_dir": output_dir,
        "max_seq_length": LENGTH,
        "train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "log_steps": 1,
        "save_checkpoints_steps": 2,
        "keep_checkpoint_max": 9,
    }
    if task == "glue":
        return {**given, "task_name": "RTE", "data_dir": files / "RTE", **changes}
    train, predict = ("questions.json",) * 2 if task == "squad" else ("train.txt", "dev.txt")
    if task == "squad":
        given["max_query_length"] = 48
    if changes.get("do_train") != "false":
        given["train_file"] = files / train
    return {**given, "predict_file": files / predict, "doc_stride": 16, **changes}


def finetune(task, files, output_dir, architecture="bert", **changes):
    """The command of a task in this process: namespace of its status, and of what it printed."""
    return recorded_calls.run(*TASKS[task], **flags_of(task, files, output_dir, architecture, **changes))
