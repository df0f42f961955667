"""Runs of the fine-tuning commands up to the outer loop, which is handed over to the test."""

import contextlib
import dataclasses
import inspect
import io
import json
import types

import numpy as np
import pytest
from squad_files import CONTEXT, QUESTIONS, entry, write
from tiny import CONFIG

import run_squad
from bert_packed import finetune_glue, finetune_ner
from bert_packed.checkpoints import checkpoint
from bert_packed.config import QUESTION_ANSWERING
from bert_packed.core import command_line
from bert_packed.evaluation import glue_predictions, squad_predictions
from bert_packed.models.packed_model import build_model
from bert_packed.runs import finetuning
from bert_packed.runs.finetuning_config import GlueConfig, NerConfig, SquadConfig
from bert_packed.tasks import squad, squad_windows
from bert_packed.text import tokenization
from bert_packed.training import loop
from bert_packed.training.engines.engine import named_weights

LENGTH, SAVES = 48, 4
WORDS = [f"w{number}" for number in range(20)]


def write_files(folder):
    """Write questions, vocabularies, models, and a folder of SST-2 and of RTE; returns the folder."""
    write(folder / "questions.json", *QUESTIONS)
    pair = [entry("1", "Who wrote it?", "Ada Lovelace"), entry("2", "Why?", is_impossible=True)]
    for name in ("train", "predict"):
        write(folder / f"{name}.json", (CONTEXT, pair), version="v2.0")
    for name, words in (("vocab", WORDS), ("other", WORDS[::-1])):
        lines = [*tokenization.SPECIAL_TOKENS, *words]
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    for name, width in (("narrow", 16), ("wide", 32)):
        shape = {"vocab_size": len(lines), "hidden_size": width, "num_hidden_layers": 1}
        config = dataclasses.replace(CONFIG, **shape, **rates, max_position_embeddings=LENGTH)
        (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(config)))
    model = build_model(QUESTION_ANSWERING, config, num_outputs=2, seed=7)
    checkpoint.save_weights(folder / "start", named_weights(model), config)
    for task, header in (("SST-2", "sentence\tlabel"), ("RTE", "index\tsentence1\tsentence2\tlabel")):
        (folder / task).mkdir()
        row = "w1 w2\t1" if task == "SST-2" else "0\tw1 w2\tw3\tentailment"
        for split in ("train", "dev"):
            (folder / task / f"{split}.tsv").write_text(f"{header}\n" + f"{row}\n" * 4)
    (folder / "RTE" / "test.tsv").write_text("index\tsentence1\tsentence2\n0\tw1 w2\tw3\n")
    return folder


RECORDED = (
    (finetuning, "plan_updates"),
    (finetuning, "pack_all"),
    (finetuning, "predict"),
    (squad, "read_squad"),
    (squad_windows, "make_windows"),
    (squad_predictions, "extract"),
    (tokenization, "make_tokenizer"),
    (finetune_glue, "read_glue"),
    (glue_predictions, "read_glue"),
    (finetune_glue, "make_glue_sequences"),
    (finetune_ner, "read_conll"),
    (finetune_ner, "make_tag_sequences"),
)


def run(command, folder, **flags):
    """A command under flags: what reached the loop, the arguments of `RECORDED`, and what it left."""
    seen = types.SimpleNamespace(engine=None, calls={}, folder=folder)
    main, config_class = {
        "squad": (run_squad.main, SquadConfig),
        "glue": (finetune_glue.main, GlueConfig),
        "ner": (finetune_ner.main, NerConfig),
    }[command]

    def train(engine, steps, hooks, first_step, state):
        seen.engine, seen.steps, seen.hooks = engine, steps, hooks
        seen.weights = {name: variable.numpy() for name, variable in engine.weights().items()}
        seen.batch = next(iter(hooks.batches(first_step)))
        for step in range(SAVES):
            hooks.save(step, {})
        hooks.prune()

    def recording(function):
        def call(*arguments, **keywords):
            bound = inspect.signature(function).bind(*arguments, **keywords)
            seen.calls.setdefault(function.__name__, []).append(bound.arguments)
            return (
                zeros(**bound.arguments)
                if function.__name__ == "predict"
                else function(*arguments, **keywords)
            )

        return call

    def zeros(forward, sequences, **_):
        seen.forward = forward
        lengths = sequences["lengths"]
        found = {name: [np.zeros(n) for n in lengths] for name in ("start_logits", "end_logits")}
        return {**found, "logits": [np.zeros((n, 2) if command == "ner" else 2) for n in lengths]}

    argv = [command, *(f"--{name}={value}" for name, value in {"output_dir": folder, **flags}.items())]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as error:
        patch.setattr(loop, "train", train)
        for module, name in RECORDED:
            patch.setattr(module, name, recording(getattr(module, name)))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            seen.status = command_line.run(main, config_class, "", argv)
    seen.error, seen.out = error.getvalue(), out.getvalue()
    return seen


def arguments(seen, function, name):
    """The values that an argument of a recorded function had, one a call."""
    return [call[name] for call in seen.calls.get(function, [])]
