"""Commands in this process, with arguments of chosen functions recorded; settings of all that train."""

import contextlib
import inspect
import io
import json
import types

import pytest

from bert_packed.core import command_line


def run(main, config_class, recorded=(), replaced=None, **flags):
    """A command under flags: its exit status, what it printed, and the calls of chosen functions.

    Args:
        main, config_class: Function and config class of the command.
        recorded: Pairs `(module, name)` of functions or classes that still do their work.
        replaced: Dict from such pairs to what is called in their place.
        flags: Values of flags by name.

    Returns:
        Namespace of `status`, `error`, `out` and `calls`: the dicts of arguments, by name of the function.
    """
    seen = types.SimpleNamespace(calls={})
    replaced = replaced or {}

    def recording(name, function, stand_in):
        def call(*arguments, **keywords):
            bound = inspect.signature(function).bind(*arguments, **keywords)
            seen.calls.setdefault(name, []).append(bound.arguments)
            return stand_in(*arguments, **keywords)

        return call

    argv = ["command", *(f"--{name}={value!s}" for name, value in flags.items())]
    error, out = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (*recorded, *replaced):
            function = getattr(module, name)
            patch.setattr(module, name, recording(name, function, replaced.get((module, name), function)))
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(out):
            seen.status = command_line.run(main, config_class, argv)
    seen.error, seen.out = error.getvalue(), out.getvalue()
    return seen


def assert_refused(main, config_class, message, **flags):
    """Assert that a command refuses flags in one line that holds `message`, with exit status 2."""
    seen = run(main, config_class, **flags)
    assert (seen.status, seen.error.count("\n")) == (2, 1) and message in seen.error, seen.error


def arguments(seen, function, name):
    """The values that an argument of a recorded function had, one a call."""
    return [call.get(name) for call in seen.calls.get(function, [])]


def other_run(folder):
    """A folder that holds a run under other flags."""
    (folder / "checkpoint-77").mkdir(parents=True)
    record = {"flags": {"learning_rate": 9.0}, "model": {}, "data": {}, "inputs": {}}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def add_results(seen, folder):
    """Add what a run gave to `training.loop.train`, its weights and first batch to its namespace."""
    seen.folder = folder
    for name in ("engine", "config", "hooks"):
        setattr(seen, name, (arguments(seen, "train", name) or [None])[0])
    if seen.engine:
        seen.weights = {name: variable.numpy() for name, variable in seen.engine.weights().items()}
        seen.batch = next(iter(seen.hooks.batches(0)))
    return seen


def attention(seen):
    return seen.engine.model.bert.blocks[0].attention


# Settings of every command that trains, and where each is seen, with this value
CHANGED = {"micro_batch_size": 2, "learning_rate": 0.03, "weight_decay": 0.05, "beta_1": 0.8, "beta_2": 0.95}
CHANGED |= {"epsilon": 1e-3, "max_grad_norm": 0.5, "dtype": "mixed_bfloat16", "remat": True}
CHANGED |= {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3, "max_skipped_steps": 7}
CHANGED |= {"log_steps": 3, "save_checkpoints_steps": 11, "keep_checkpoint_max": 2, "overwrite": True}
SAVES = 5  # of each run
SEEN = {
    "micro_batch_size": (lambda seen: arguments(seen, "make_engine", "arguments")[0][3], 2),
    "epsilon": (lambda seen: seen.engine.optimizer.epsilon, 1e-3),
    "weight_decay": (lambda seen: seen.engine.optimizer.weight_decay_rate, 0.05),
    "max_grad_norm": (lambda seen: seen.engine.max_grad_norm, 0.5),
    "bert_config_file": (lambda seen: seen.engine.model.bert.config.hidden_size, 32),
    "remat": (lambda seen: seen.engine.model.bert.remat, True),
    "dtype": (lambda seen: attention(seen).query.compute_dtype, "bfloat16"),
    "hidden_dropout_prob": (lambda seen: attention(seen).dropout.rate, 0.2),
    "attention_probs_dropout_prob": (lambda seen: attention(seen).attention_dropout.rate, 0.3),
    "max_skipped_steps": (lambda seen: seen.config.max_skipped_steps, 7),
    "log_steps": (lambda seen: seen.config.log_steps, 3),
    "save_checkpoints_steps": (lambda seen: seen.config.save_checkpoints_steps, 11),
    "keep_checkpoint_max": (
        lambda seen: {path.name for path in seen.folder.glob("checkpoint-*")},
        {"checkpoint-3", "checkpoint-4"},  # and, with overwrite, none of the earlier run
    ),
}
