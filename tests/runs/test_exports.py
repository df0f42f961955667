"""A run exports what transformers opens, each step whole or not at all, and its card invents nothing."""

import json
import shutil
import types

import numpy as np
import pytest
from pretraining_command import arguments, run, write_all
from reference import import_reference
from safetensors.numpy import load_file
from tiny import make_engine

from bert_packed.runs import exports
from bert_packed.runs.input_files import PackedFiles
from bert_packed.runs.vocabulary import known_length
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.nonfinite import NotFiniteError

pytestmark = pytest.mark.usefixtures("uncompiled_file")
FLAGS = {"num_train_steps": 6, "export_every": 2, "save_checkpoints_steps": 3, "eval_steps": 0}


def write_vocabulary(folder):
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "pack", "##ed", "cafe"]) + "\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = write_all(tmp_path_factory.mktemp("data"))
    write_vocabulary(folder)
    return folder


@pytest.fixture(scope="module")
def exported(data, tmp_path_factory):
    """The output directory of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("run") / "out"
    assert run(*arguments(data, folder, **FLAGS, export_vocab_file=data / "vocab.txt")) == 0
    return folder


def names_in(folder):
    return sorted(path.name for path in folder.glob("export*"))


@pytest.mark.slow
def test_transformers_opens_each(exported):
    _, transformers = import_reference()
    assert names_in(exported) == ["export-2", "export-4", "export-6"]
    assert sorted(path.name for path in (exported / "export-2").iterdir()) == [
        *("README.md", "config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "vocab.txt"),
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported / "export-6")
    assert tokenizer("Packed Café")["input_ids"] == [2, 5, 6, 7, 3]
    model = transformers.AutoModel.from_pretrained(exported / "export-6")
    last = load_file(exported / "checkpoint-6" / "model.safetensors")
    np.testing.assert_array_equal(
        model.embeddings.position_embeddings.weight.detach().numpy(),
        next(values for name, values in last.items() if "position_embeddings" in name),
    )


@pytest.mark.slow
def test_a_run_that_was_killed_has_the_same_exports(data, exported, tmp_path, monkeypatch):
    """Interrupted while it exports step 4, behind a checkpoint of step 3, then killed within an export."""
    write = exports.write_model_card

    def fail(folder, *arguments, **options):
        if folder.name == "export-4.partial":
            raise KeyboardInterrupt
        write(folder, *arguments, **options)

    command = arguments(data, tmp_path / "out", **FLAGS, export_vocab_file=data / "vocab.txt")
    with monkeypatch.context() as patch:
        patch.setattr(exports, "write_model_card", fail)
        assert run(*command) == 130
    assert names_in(tmp_path / "out") == ["export-2"]
    # A kill would leave its folder
    shutil.copytree(exported / "export-2", tmp_path / "out" / "export-4.partial")
    # The step is taken again, so that this export, with another's weights, must not stay
    shutil.copytree(exported / "export-2", tmp_path / "out" / "export-4")
    assert run(*command) == 0
    assert names_in(tmp_path / "out") == names_in(exported)
    for step in (2, 4, 6):
        folders = (folder / f"export-{step}" / "model.safetensors" for folder in (tmp_path / "out", exported))
        assert_equal(*map(load_file, folders))


def export(folder, run=None, seed=1, manifests=(), damage=None):
    """The export of step 7 of a run, by the content of its `run.json` and its records' manifests."""
    (folder / "run.json").write_text(json.dumps({"flags": {}} | (run or {})))
    data = types.SimpleNamespace(train=PackedFiles([], None, list(manifests), False))
    engine, config = make_engine(seed=seed), types.SimpleNamespace(export_vocab_file="")
    if damage:
        engine.weights()[damage].assign(np.full((16, 16), np.nan))
    return exports.export_step(folder, 7, engine.model, engine.weights(), config, data)


@pytest.fixture
def with_vocabulary(tmp_path):
    write_vocabulary(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("manifests", "is_lower"),
    [([], True), ([{}, {"do_lower_case": False}], False), ([{"do_lower_case": True}], True)],
)
def test_case_is_that_of_the_records(with_vocabulary, manifests, is_lower):
    folder = export(with_vocabulary, manifests=manifests)
    assert json.loads((folder / "tokenizer_config.json").read_text())["do_lower_case"] is is_lower


@pytest.mark.parametrize(
    ("longest", "start", "length"),
    # The start is not known, so it may have seen longer ones; it is shorter, or longer; the run is older
    [(7, "", 7), (7, "elsewhere", 24), (7, __file__, 24), (7, "5", 7), (7, "12", 12), (None, "", 24)],
)
def test_lengths_are_those_that_were_trained(with_vocabulary, longest, start, length):
    """Positions behind the longest sequence of a run are random; the model has 24."""
    if start.isdecimal():
        (with_vocabulary / "start").mkdir()
        (with_vocabulary / "start" / "tokenizer_config.json").write_text(f'{{"model_max_length": {start}}}')
        start = str(with_vocabulary / "start")
    run = {"flags": {"init_checkpoint": start}, "data": {"longest_sequence": longest}}
    folder = export(with_vocabulary, run)
    assert [known_length(where) or 24 for where in (folder, with_vocabulary)] == [length] * 2
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == length


def test_an_export_is_replaced_whole_or_stays(tmp_path, monkeypatch):
    first = load_file(export(tmp_path) / "model.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(exports, "write_model_card", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            export(tmp_path, seed=2)
    assert_equal(load_file(tmp_path / "export-7" / "model.safetensors"), first)
    removed, rmtree = [], shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **how: removed.append(path.name) or rmtree(path, **how))
        second = load_file(export(tmp_path, seed=2) / "model.safetensors")
    # It never goes under its own name: killed in the middle, it would be half empty
    assert "export-7.replaced.partial" in removed and "export-7" not in removed
    assert names_in(tmp_path) == ["export-7"]
    name = "bert.embeddings.word_embeddings.weight"
    assert not np.array_equal(first[name], second[name])
    with pytest.raises(NotFiniteError, match=r"Received: nan in bert\.\S+query\.weight of the export"):
        export(tmp_path, damage="bert/layer_0/attention/query/kernel")
    assert_equal(load_file(tmp_path / "export-7" / "model.safetensors"), second)


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours[name], values, err_msg=name)
