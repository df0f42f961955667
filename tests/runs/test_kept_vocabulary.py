"""A pre-training run keeps the vocabulary of its records, and later commands find it there."""

import dataclasses
import json
import shutil

import pytest
from exports import run_export
from pretraining_command import arguments, run, write_all
from tiny import manifest_of

from bert_packed.core.settings import InputError
from bert_packed.core.storage import file_sha256
from bert_packed.runs.checkpoint_export import ExportConfig
from bert_packed.runs.vocabulary import with_run_vocabulary
from bert_packed.text.tokenization import SPECIAL_TOKENS

pytestmark = pytest.mark.usefixtures("uncompiled_file")
FLAGS = {"num_train_steps": 2, "eval_input_file": "", "eval_steps": 0, "save_checkpoints_steps": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Packs whose manifest says that they are of a cased vocabulary, which lies beside them."""
    folder = write_all(tmp_path_factory.mktemp("data"))
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "Pack", "##ed"]) + "\n")
    manifest = manifest_of(vocab_sha256=file_sha256(folder / "vocab.txt"), do_lower_case=False)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """The output directory of a run."""
    folder = tmp_path_factory.mktemp("run") / "out"
    assert run(*arguments(data, folder, **FLAGS, export_every=2)) == 0
    return folder


def test_the_run_has_a_copy_and_says_what_it_is(data, finished):
    assert (finished / "vocab.txt").read_bytes() == (data / "vocab.txt").read_bytes()
    assert json.loads((finished / "run.json").read_text())["vocabulary"] == {
        "file": "vocab.txt",
        "sha256": file_sha256(data / "vocab.txt"),
        "do_lower_case": False,
    }
    tokenizer = json.loads((finished / "export-2" / "tokenizer_config.json").read_text())
    assert tokenizer["do_lower_case"] is False


def test_an_export_takes_it(data, finished, tmp_path):
    (tmp_path / "other.txt").write_text("\n".join([*SPECIAL_TOKENS, "other"]) + "\n")
    for name in ("checkpoint-2", ""):
        flags = {"init_checkpoint": str(finished / name), "output_dir": str(tmp_path / "hf")}
        cased = ExportConfig(**flags, do_lower_case=False)
        assert with_run_vocabulary(cased).vocab_file == str(finished / "vocab.txt")
        with pytest.raises(InputError, match=r"`do_lower_case` must be as .*, False by .*Received: True\."):
            with_run_vocabulary(ExportConfig(**flags))
        with pytest.raises(InputError, match="`vocab_file` must be the one that `init_checkpoint` was train"):
            with_run_vocabulary(dataclasses.replace(cased, vocab_file=str(tmp_path / "other.txt")))
        # The other forms hold no tokenizer
        assert not with_run_vocabulary(ExportConfig(**flags, format="keras")).vocab_file
    assert run_export(**flags, do_lower_case=False) == 0
    assert (tmp_path / "hf" / "vocab.txt").read_bytes() == (data / "vocab.txt").read_bytes()


def test_a_run_of_a_version_that_kept_none_gets_one(data, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    content = json.loads((folder / "run.json").read_text())
    kept = content.pop("vocabulary")
    (folder / "run.json").write_text(json.dumps(content))
    (folder / "vocab.txt").unlink()
    shutil.rmtree(folder / "checkpoint-2")
    assert run(*arguments(data, folder, **FLAGS)) == 0
    assert (folder / "vocab.txt").read_bytes() == (data / "vocab.txt").read_bytes()
    assert json.loads((folder / "run.json").read_text())["vocabulary"] == kept
