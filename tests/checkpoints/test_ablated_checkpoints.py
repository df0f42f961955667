"""A checkpoint of an ablation passes for sound nowhere, whatever plain config is given beside it."""

import dataclasses
import json

import pytest
from squad_files import CONTEXT, entry, write
from tiny import CONFIG, make_engine, write_data

from bert_packed import cli
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import QUESTION_ANSWERING, ablate
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.core import command_line
from bert_packed.core.settings import InputError
from bert_packed.evaluation import contamination, inference
from bert_packed.evaluation.checkpoint_audit import AuditConfig
from bert_packed.runs.checkpoint_export import export_checkpoint
from bert_packed.runs.export_config import ExportConfig
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.tasks.glue.config import GlueConfig
from bert_packed.tasks.squad.config import SquadConfig
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.engines.engine import named_weights

FORMS = ("ours", "hugging_face")
REFUSED = "holds another model: ablation"


def run(main, config_class, **flags):
    argv = ["program", *(f"--{name}={value}" for name, value in flags.items())]
    return command_line.run(main, config_class, argv)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model trained without the mask, as a checkpoint of ours and exported; a plain config; data."""
    folder = tmp_path_factory.mktemp("ablated")
    config = ablate(CONFIG, "no_attention_mask")
    checkpoint.save_weights(folder / "ours", make_engine(config=config).weights(), config)
    flags = {"init_checkpoint": folder / "ours", "output_dir": folder / "hugging_face"}
    assert run(export_checkpoint, ExportConfig, **flags) == 0
    (folder / "plain.json").write_text(json.dumps(dataclasses.asdict(CONFIG)))
    words = [f"w{number}" for number in range(CONFIG.vocab_size - len(SPECIAL_TOKENS))]
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *words]) + "\n")
    write_data(folder)
    write(folder / "questions.json", (CONTEXT, [entry("1", "Who wrote it?", "Ada Lovelace")]))
    (folder / "train.tsv").write_text("sentence\tlabel\nw1 w2\t1\n")
    return folder


def command_of(name, files):
    """A command's `main`, its config and its flags but the model's."""
    text = {"vocab_file": files / "vocab.txt", "max_seq_length": 24}
    questions = {"train_file": files / "questions.json", "do_predict": "false", "max_query_length": 8}
    return {
        "pretraining": (cli.pretrain, PretrainingConfig, {"input_file": f"{files}/*.tfrecord"}),
        "squad": (cli.squad, SquadConfig, {**text, **questions}),
        "glue": (
            cli.fine_tune,
            GlueConfig,
            {**text, "task_name": "SST-2", "data_dir": files, "do_eval": "false"},
        ),
        "export": (export_checkpoint, ExportConfig, {}),
    }[name]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["pretraining", "squad", "glue", "export"])
def test_commands_refuse_it_in_one_line(files, tmp_path, capsys, name, form):
    main, config_class, flags = command_of(name, files)
    model = {"init_checkpoint": files / form, "bert_config_file": files / "plain.json"}
    assert run(main, config_class, **flags, **model, output_dir=tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert REFUSED in error and error.count("\n") == 1
    assert not list(tmp_path.rglob("checkpoint-*")) and not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("form", FORMS)
def test_the_audit_fails_it(files, form, capsys, monkeypatch):
    monkeypatch.setattr(contamination, "audit", lambda *_: [])  # only what the settings tell
    flags = {"input_file": f"{files}/*.tfrecord", "init_checkpoint": files / form}
    status = run(cli.audit, AuditConfig, **flags, bert_config_file=files / "plain.json")
    assert status == cli.STATUS_FAILED
    assert "settings: ablations of the checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("form", FORMS)
def test_texts_are_not_encoded_with_it(files, form):
    with pytest.raises(InputError, match=REFUSED):
        inference.load_encoder(files / form, files / "vocab.txt", str(files / "plain.json"))


def test_a_sound_checkpoint_may_start_an_experiment(files):
    """The other way round nothing is hidden: the run's own checkpoints say what it breaks."""
    config = ablate(CONFIG, "no_attention_mask,no_next_sentence")
    model = build_model(QUESTION_ANSWERING, config, num_outputs=2, seed=0)
    found = starting_weights.load(files / "ours", named_weights(model), config, QUESTION_ANSWERING)
    assert found.num_used
    assert starting_weights.stored_ablations(files / "ours") == ["no_attention_mask"]
