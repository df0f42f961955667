"""Every setting of `bert-packed train` reaches the steps that it is for, and changes nothing else of them.

The fault that this file alone catches: a setting that is not handed on, so that a step takes its default. The
steps themselves are left out; what they would be called with is compared.
"""

import dataclasses
import json
import os
import shutil

import pytest
from tiny import CONFIG

from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.text_to_model import choices, output_folder, steps
from bert_packed.text_to_model.config import TrainConfig
from bert_packed.text_to_model.output_folder import OutputFolder
from bert_packed.training import backend
from data_gen import pack_job
from data_gen.text import create_job

MANIFEST = {"packing_factor": 2.0, "num_sequences": 20_000, "num_packs": 10_000}
AUDIT = [{"name": "a check", "largest": 0, "tolerance": 0, "result": "pass"}]
PLACES = {
    *("create.output_dir", "pack-train.input_file", "pack-train.output_dir", "pack-eval.input_file"),
    *("pack-eval.output_dir", "pretrain.input_file", "pretrain.eval_input_file", "pretrain.output_dir"),
    *("pretrain.vocab_file", "audit.input_file", "audit.init_checkpoint", "export.init_checkpoint"),
    *("export.output_dir", "export.vocab_file", "export.audit_file"),
}
STEPS = {
    f"pretrain.{name}"
    for name in ("num_train_steps", "num_warmup_steps", "eval_steps", "save_checkpoints_steps")
}
# Each setting has another value here, and the settings of steps that take it or follow from it
REACHES = {
    "input_file": ("other.txt", {"create.input_file"}),
    "output_dir": ("other", PLACES),
    "text_column": ("body", {"create.text_column"}),
    "vocab_file": ("words.txt", {"create.vocab_file"}),
    "vocab_size": (300, {"create.vocab_size"}),
    "do_lower_case": (False, {"create.do_lower_case", "export.do_lower_case"}),
    "max_seq_length": (
        64,
        {f"{step}.max_seq_length" for step in ("create", "pack-train", "pack-eval")}
        | {"pretrain.micro_batch_size", "pretrain.eval_batch_size"},  # by the tokens computed at once
    ),
    "masked_lm_prob": (0.3, {"create.masked_lm_prob"}),
    "eval_fraction": (0.25, {"create.eval_fraction"}),
    "bert_config_file": ("bert-tiny", {"pretrain.bert_config_file"}),
    "init_checkpoint": (
        "model",
        {"pretrain.init_checkpoint", "create.vocab_file"}
        | {"pretrain.bert_config_file", "pretrain.learning_rate"},
    ),
    "num_train_epochs": (5.0, STEPS),
    "train_hours": (2.0, STEPS),
    "train_batch_size": (24, STEPS | {"pretrain.train_batch_size"}),
    "learning_rate": (0.5, {"pretrain.learning_rate"}),
    "random_seed": (7, {f"{s}.random_seed" for s in ("create", "pack-train", "pack-eval", "pretrain")}),
    "attention": ("dense", {"pretrain.attention"}),
    "distribution": ("mirrored", {"pretrain.distribution"}),
    "num_workers": (2, {f"{step}.num_workers" for step in ("create", "pack-train", "pack-eval")}),
    "overwrite": (True, set()),  # `output_folder.begin` reads it
}


@pytest.fixture
def settings_of(tmp_path, monkeypatch):
    """Function from settings of `train` to those of all steps: dict from "step.setting" to the value."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("\n".join([*SPECIAL_TOKENS, "word"]) + "\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").touch()
    (tmp_path / "model/config.json").write_text(json.dumps(dataclasses.asdict(CONFIG)))
    shutil.copy(tmp_path / "words.txt", tmp_path / "model/vocab.txt")
    taken, manifests = {}, {}

    def take(step, result=None):
        def stand_in(config):
            name = f"{step}-{config.output_dir.rpartition('/')[2]}" if step == "pack" else step
            taken.update({f"{name}.{key}": value for key, value in dataclasses.asdict(config).items()})
            if step in ("create", "pack"):
                manifests[config.output_dir] = MANIFEST
            return result

        return stand_in

    stopped = dataclasses.make_dataclass("Result", ["stopped_by"])(0)
    names = ("sequences", "packs", "lower bound", "efficiency %", "packing factor")
    for module, name, stand_in in (
        (create_job, "create", take("create")),
        (create_job, "summarize", lambda _: []),
        (pack_job, "pack", take("pack", MANIFEST)),
        (pack_job, "metrics_row", lambda _: dict.fromkeys(names, 0)),
        (steps, "_prove_packs", lambda *_: ()),
        (steps, "pretrain", take("pretrain", stopped)),
        (steps, "audit_checkpoint", take("audit", AUDIT)),
        (steps, "export_checkpoint", take("export")),
        (output_folder, "read_own_manifest", lambda folder, kind: manifests.get(folder)),
        (choices, "time_step", lambda _: 1.0),
        (backend, "device_memory_bytes", lambda: None),
    ):
        monkeypatch.setattr(module, name, stand_in)

    def run(**settings):
        taken.clear()
        manifests.clear()
        config = TrainConfig(**{"input_file": "text.txt", "output_dir": "my", **settings})
        shutil.rmtree(config.output_dir, ignore_errors=True)
        os.mkdir(config.output_dir)  # as `output_folder.begin` does
        result = steps._run_steps(config, OutputFolder(config.output_dir), 1000)
        assert result.model_dir == f"{config.output_dir}/model"
        return dict(taken)

    return run


def test_every_setting_has_its_steps():
    assert [*REACHES] == [field.name for field in dataclasses.fields(TrainConfig)]


@pytest.mark.parametrize("name", REACHES)
def test_a_setting_reaches_its_steps_and_no_other(settings_of, name):
    value, reached = REACHES[name]
    before, after = settings_of(), settings_of(**{name: value})
    found = {key for key in before if before[key] != after[key]}
    assert before.keys() == after.keys() and found == reached
    for key in reached:
        if key.endswith(f".{name}"):
            assert str(after[key]).startswith(str(value))  # a place is below the given one
