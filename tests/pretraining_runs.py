"""Runs of `run_pretraining.py` up to the outer loop, which is handed over to the test instead of training.

Once with every flag changed, once with what must be given, and for flags that exclude each other a few times
more.
"""

import contextlib
import dataclasses
import io
import json
import sys
import types

import next_tokens
import numpy as np
import pytest
from packs import VOCAB_SIZE, batch_of, random_packs, random_sequence, write_packs
from tiny import CONFIG, MAX_SEQ_LENGTH, make_engine

import run_pretraining
from bert_packed.checkpoints import checkpoint
from bert_packed.config import ablate, config_json
from bert_packed.core import command_line
from bert_packed.core.settings import InputError
from bert_packed.objectives.features import BATCH_NAMES
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.runs import compile_only, pretraining, run_summary
from bert_packed.runs.pretraining_config import TrainConfig
from bert_packed.text import tokenization
from bert_packed.training import loop
from bert_packed.training.optimization import build_optimizer
from bert_packed.training.step_report import StepProgram
from data_gen import sample_data

FACTOR = 2.0  # of the changed run's data
WIDE = dataclasses.replace(CONFIG, hidden_size=32)
EMPTY_PROGRAM = "HloModule step\n\nENTRY main {\n  ROOT x = f32[] parameter(0)\n}"
SAVES = 5
MOMENT, STEPS_BEFORE = 0.25, 8  # of the run whose optimizer's state is kept
CHANGED = {
    "train_batch_size": 6,
    "micro_batch_size": 2,
    "eval_batch_size": 4,
    "num_train_steps": 50,
    "num_warmup_steps": 7,
    "num_decay_steps": 9,
    "learning_rate": 0.03,
    "end_learning_rate": 0.002,
    "decay_power": 2.0,
    "weight_decay": 0.05,
    "beta_1": 0.8,
    "beta_2": 0.95,
    "epsilon": 1e-3,
    "max_grad_norm": 0.5,
    "mlm_loss": "per_token",
    "packing_correction": "betas",
    "ablation": "no_next_sentence",
    "dtype": "mixed_bfloat16",
    "remat": True,
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.3,
    "shuffle_buffer_size": 1,
    "max_skipped_steps": 7,
    "log_steps": 3,
    "eval_steps": 5,
    "max_eval_steps": 1,
    "save_checkpoints_steps": 11,
    "peak_flops": 2e12,
    "profile_steps": "3,4",
    "keep_checkpoint_max": 2,
    "export_every": 13,
    "sample_data": True,
    "overwrite": True,
    "keep_optimizer_state": True,
}  # and files, see `make_runs`


def write(path, packs, **shape):
    path.parent.mkdir(exist_ok=True)
    write_packs(path, packs, MAX_SEQ_LENGTH, **shape)
    return path


def write_files(folder):
    """Write records and models for the runs: the folder, and the token ids of each file's packs by name."""
    rng = np.random.default_rng(0)
    packs = {  # with more predictions than sequences
        name: [[random_sequence(rng, 6, 2), *pack[1:]] for pack in random_packs(rng, size, MAX_SEQ_LENGTH)]
        for name, size in (("a", 9), ("b", 12), ("c", 6))
    }
    for name in packs:
        write(folder / name / "packed.tfrecord", packs[name])
    single = batch_of([[s] for pack in packs["b"] for s in pack], MAX_SEQ_LENGTH, 1, 8)
    features = {name: single[ours] for name, ours in BATCH_NAMES.items()}
    tfrecords.write_records(folder / "unpacked.tfrecord", serialize_examples(features))
    manifest = {"kind": "packed", "files": [], "num_sequences": 12 * FACTOR, "num_packs": 12}
    (folder / "b" / "manifest.json").write_text(json.dumps({**manifest, "histogram": {"lengths": [6]}}))
    narrow = dataclasses.replace(CONFIG, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    for name, config in (("narrow", narrow), ("wide", WIDE)):
        (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(config)))
    wordpieces = (*tokenization.SPECIAL_TOKENS, *(f"w{number}" for number in range(VOCAB_SIZE - 5)))
    tokenization.save_vocab(tokenization.Vocabulary(wordpieces), folder / "vocab.txt")
    (folder / "mamba.json").write_text(json.dumps(config_json(next_tokens.CONFIG)))
    (folder / "next").mkdir()
    next_tokens.write_packs(folder / "next" / "packed.tfrecord", next_tokens.packed_and_unpacked()[0])
    ablated = ablate(WIDE, CHANGED["ablation"])
    earlier = make_engine(
        config=ablated, seed=7, optimizer=build_optimizer(TrainConfig(input_file="x", output_dir="y"))
    )
    for variable in earlier.optimizer.variables:
        variable.assign(np.full(variable.shape, MOMENT).astype(variable.dtype))
    earlier.optimizer.iterations.assign(STEPS_BEFORE)
    checkpoint.save_checkpoint(folder / "start", 3, earlier, ablated, {})
    rows = {name: batch_of(packs[name], MAX_SEQ_LENGTH, 4, 12)["token_ids"].tolist() for name in packs}
    return folder, {**rows, "unpacked": single["token_ids"].tolist()}


def run(folder, **flags):
    """A run under flags, up to the loop: what reached it and what it left."""
    seen = types.SimpleNamespace(
        engine=None,
        built_sample=False,
        contenders=[],
        evaluated=[],
        devices=[],
        spread=(None, None, None, None),
    )

    def train(engine, config, hooks, first_step, state):
        seen.engine, seen.steps, seen.hooks = engine, config, hooks
        seen.weights = {name: variable.numpy() for name, variable in engine.weights().items()}
        seen.seeds = [v.numpy() for n, v in engine.training_state().items() if n.startswith("dropout_seed/")]
        seen.batches = hooks.batches(first_step)
        seen.batch = next(seen.batches)

        def eval_step(batch):
            seen.evaluated.append(batch["token_ids"])
            return dict.fromkeys(engine.objective.sum_names, 1.0)

        engine.eval_step = eval_step
        if hooks.evaluate:
            hooks.evaluate(SAVES)
        for step in range(SAVES):
            hooks.save(step, {})
        if hooks.export:
            hooks.export(SAVES)
        hooks.prune()

    def compare(contenders, _):
        seen.contenders = contenders
        return [{"data": contender.name} for contender in contenders]

    def measure(dtype):
        seen.dtype = dtype
        return 1e9

    def spread(*arguments):
        seen.spread = arguments
        raise InputError("no more is wanted")

    flags = {"output_dir": folder, **flags}
    argv = ["run_pretraining.py", *(f"--{name}={value!s}" for name, value in flags.items())]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as error:
        patch.setattr(loop, "train", train)
        patch.setattr(run_summary, "describe_cost", lambda *_: "")
        patch.setattr(sample_data, "build_missing", lambda: setattr(seen, "built_sample", True))
        patch.setattr(pretraining, "compare", compare)
        patch.setattr(pretraining, "measured_flops_per_second", measure)
        patch.setattr(compile_only, "compile_step", lambda *_: [StepProgram(EMPTY_PROGRAM, 1.0, 2)])
        patch.setattr(compile_only, "make_virtual_devices", seen.devices.append)
        if "layout" in flags:  # which JAX alone has; what a mesh does, other tests see
            patch.setattr(pretraining.keras.backend, "backend", lambda: "jax")
            stand_in = types.SimpleNamespace(make_layout_replicas=spread)  # the module needs JAX
            patch.setitem(sys.modules, "bert_packed.parallel.layouts", stand_in)
        with contextlib.redirect_stdout(io.StringIO()):
            seen.status = command_line.run(run_pretraining.main, TrainConfig, "", argv)
    seen.folder, seen.error = folder, error.getvalue()
    return seen


def other_run(folder):
    """A folder that holds a run under other flags."""
    (folder / "checkpoint-77").mkdir(parents=True)
    record = {"flags": {"learning_rate": 9.0}, "model": {}, "data": {}, "inputs": {}}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def make_runs(folder, tmp):
    """The runs by name, and the changed flags.

    Args:
        folder: From `write_files`.
        tmp: Folder for what they leave.
    """
    given = {
        "input_file": folder / "a" / "*",
        "bert_config_file": folder / "narrow.json",
        "train_batch_size": 3,
        "num_train_steps": 20,
    }
    changed = {
        **CHANGED,
        "input_file": folder / "b" / "*.tfrecord",
        "eval_input_file": folder / "c" / "*",
        "bert_config_file": folder / "wide.json",
        "init_checkpoint": folder / "start",
        "unpacked_input_file": folder / "unpacked.tfrecord",
        "export_vocab_file": folder / "vocab.txt",
        "json": tmp / "report.json",
    }
    masking = {
        "masking": "dynamic",
        "vocab_file": folder / "vocab.txt",
        "do_whole_word_mask": True,
        "mask_replace_prob": 0.5,
        "random_replace_prob": 0.25,
    }
    grown = {"initial_batch_size": 2, "batch_warmup_steps": 4}
    made = {
        "default": run(tmp / "default", **given),
        "changed": run(other_run(tmp / "changed"), **changed),
        "seeded": run(tmp / "seeded", **given, random_seed=99),
        "flash": run(tmp / "flash", **given, attention="flash"),
        "mirrored": run(tmp / "mirrored", **given, distribution="mirrored"),
        "grown": run(
            tmp / "grown", **{**given, "train_batch_size": 6}, **grown, **masking, micro_batch_size=2
        ),
        "mlm": run(tmp / "mlm", **given, objective="mlm"),
        "adam": run(tmp / "adam", **given, optimizer="adam"),
        "masked": run(tmp / "masked", **given, **masking),
        "spread": run(tmp / "spread", **given, layout="optimus2d", mesh="2,3,3", summa="tree"),
        "kept": run(other_run(tmp / "kept"), **given),
        **{
            name: run(
                tmp / name,
                **{**given, "input_file": folder / "next" / "*", "bert_config_file": folder / "mamba.json"},
                objective="causal_lm",
                **flags,
            )
            for name, flags in (("next", {"lm_loss": "per_sequence"}), ("next by default", {}))
        },
        "compiled": run(tmp / "not made", **given, compile_only=tmp / "program", num_virtual_devices=2),
    }
    assert made["default"].status == made["changed"].status == 0, made["changed"].error
    made["default"].report = made["changed"].report = tmp / "report.json"
    return made, {
        **changed,
        "output_dir": tmp / "changed",
        **masking,
        **grown,
        "optimizer": "adam",
        "random_seed": 99,
        "attention": "flash",
        "distribution": "mirrored",
        "layout": "optimus2d",
        "mesh": "2,3,3",
        "summa": "tree",
        "compile_only": tmp / "program",
        "num_virtual_devices": 2,
        "objective": "causal_lm",
        "lm_loss": "per_sequence",
    }
