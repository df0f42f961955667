"""google-research/bert's command line of pre-training does here what its users expect."""

import json
import shutil

import numpy as np
import pytest
import recorded_calls
from foreign_checkpoints import ONE_LAYER, google_tensors, write_google
from pretraining_command import assert_refused, pretrain, read_rows
from tiny import MAX_SEQ_LENGTH

from bert_packed.records.read_bert import read_packed
from bert_packed.text.tokenization import SPECIAL_TOKENS
from data_gen import create_pretraining_data, pack_tfrecords
from data_gen.pack_config import PackConfig
from data_gen.text.create_config import CreateConfig

pytestmark = pytest.mark.usefixtures("uncompiled_file")
WORDS = [f"w{number}" for number in range(20)]


def make(module, config_class, **flags):
    seen = recorded_calls.run(module.main, config_class, **flags)
    assert seen.status == 0, seen.error


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Packs of a small text, and a checkpoint of google-research/bert: their folder."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    documents = [
        "\n".join(" ".join(rng.choice(WORDS, rng.integers(2, 7))) for _ in range(rng.integers(2, 9)))
        for _ in range(24)
    ]
    (folder / "text.txt").write_text("\n\n".join(documents))
    (folder / "words.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]))
    make(
        create_pretraining_data,
        CreateConfig,
        input_file=folder / "text.txt",
        vocab_file=folder / "words.txt",
        output_dir=folder / "instances",
        max_seq_length=MAX_SEQ_LENGTH,
        max_predictions_per_seq=20,
        short_seq_prob=0.5,
        dupe_factor=1,
        num_workers=1,
        num_shards=2,
    )
    make(
        pack_tfrecords,
        PackConfig,
        input_file=f"{folder}/instances/train-*.tfrecord",
        output_dir=folder / "packed",
        max_seq_length=MAX_SEQ_LENGTH,
    )
    write_google(folder / "uncased", google_tensors())
    return folder


def line(data, output_dir, **changes):
    """The line of google-research/bert's README."""
    return {
        "input_file": f"{data}/packed/*.tfrecord",
        "output_dir": output_dir,
        "do_train": "True",
        "do_eval": "True",
        "bert_config_file": data / "uncased" / "bert_config.json",
        "init_checkpoint": data / "uncased" / "bert_model.ckpt",
        "train_batch_size": 8,
        "max_seq_length": MAX_SEQ_LENGTH,
        "max_predictions_per_seq": 20,
        "num_train_steps": 2,
        "num_warmup_steps": 1,
        "learning_rate": 2e-5,
        **changes,
    }


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    assert pretrain(**line(data, folder)).status == 0
    return folder


def test_the_line_trains_and_evaluates(data, trained):
    packs = next(read_packed(sorted(data.glob("packed/*.tfrecord"))[0]))
    assert len(set(packs["record_numbers"].tolist())) < len(packs)  # several sequences in a pack
    assert (trained / "checkpoint-2").is_dir()
    (row,) = read_rows(trained / "eval_metrics.csv")
    results = json.loads((trained / "eval_results.json").read_text())
    assert results["step"] == 2 and results["loss"] == pytest.approx(float(row["loss"]))
    assert {"mlm_loss", "nsp_loss", "mlm_accuracy", "mlm_token_accuracy", "nsp_accuracy"} <= set(results)
    flags = json.loads((trained / "run.json").read_text())["flags"]
    # The packs of training are evaluated, of which google-research/bert takes 100 batches
    assert (flags["eval_input_file"], flags["max_eval_steps"]) == (flags["input_file"], 100)
    out = pretrain(**line(data, trained)).out
    assert "the run is complete" in out and "evaluates  the training packs" in out


@pytest.mark.slow
def test_evaluation_alone_gives_the_figures_of_the_training(data, trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "out")
    wanted = json.loads((folder / "eval_results.json").read_text())
    own = ("eval_results.json", ".lock")
    before = {
        path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file() and path.name not in own
    }
    report = tmp_path / "report.json"
    seen = pretrain(**line(data, folder, do_train="False", json=report))
    assert seen.status == 0 and f"{folder}/checkpoint-2" in seen.out
    results = json.loads((folder / "eval_results.json").read_text())
    assert {name: results[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    assert results["num_sequences"] == sum(
        len(batch) for path in data.glob("packed/*.tfrecord") for batch in read_packed(path)
    )
    assert json.loads(report.read_text())["metrics"] == [{"data": "eval", **results}]
    assert {path: path.read_bytes() for path in before} == before
    # max_eval_steps takes fewer batches, as in training; and the run goes on as if nothing had been asked
    few = {"do_train": "false", "max_eval_steps": 1, "eval_batch_size": 2}
    assert pretrain(**line(data, folder, **few)).status == 0
    assert json.loads((folder / "eval_results.json").read_text())["num_sequences"] < 40
    assert pretrain(**line(data, folder)).status == 0


def test_without_a_run_the_initial_checkpoint_is_evaluated(data, tmp_path):
    assert pretrain(**line(data, tmp_path / "new", do_train="false")).status == 0
    results = json.loads((tmp_path / "new" / "eval_results.json").read_text())
    assert results["step"] == 0 and results["loss"] > 0
    bare = {name: values for name, values in google_tensors().items() if name.startswith("bert/")}
    start = write_google(tmp_path / "bare", bare, ONE_LAYER)
    flags = line(data, tmp_path / "none", do_train="false", init_checkpoint=start)
    assert_refused("must have every head of objective=mlm_nsp", **flags)


EVALUATE = {"do_train": "False"}
MISTAKES = [
    ({"max_seq_length": 128}, "`input_file`, 24. Received: 128."),
    ({"max_seq_length": 128, **EVALUATE}, "`eval_input_file`, 24. Received: 128."),
    *(
        ({"max_predictions_per_seq": 4, **more}, "/instances/manifest.json. Received: 4.")
        for more in ({}, EVALUATE)
    ),
    ({"do_eval": "False", "eval_input_file": "{data}/packed/*"}, "must be empty with do_eval=false."),
    ({"objective": "causal_lm", "max_seq_length": 0}, "`max_predictions_per_seq` must be 0 for objective"),
    ({"input_file": "{data}/instances/train-*.tfrecord"}, "holds unpacked records; pack them first"),
    ({"use_tpu": "true"}, "use_tpu"),
    ({"do_eval": "False", **EVALUATE}, "`do_train` or `do_eval` must be true. Received: false for both."),
    ({"overwrite": "true", **EVALUATE}, "`do_train` must be true with overwrite. Received: false,"),
    ({"compile_only": "there", **EVALUATE}, "`do_train` must be true with compile_only. Received: false,"),
    ({"init_checkpoint": "", **EVALUATE}, "`output_dir` must hold a checkpoint with do_train=false"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_unsupported_flags_are_refused_in_one_line(data, tmp_path, changes, message):
    changes = {name: str(value).format(data=data) for name, value in changes.items()}
    assert_refused(message, **line(data, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_predictions_are_read_from_records_without_manifests(data, tmp_path):
    packs = shutil.copytree(data / "packed", tmp_path / "packed")
    (packs / "manifest.json").unlink()
    most = max(int(batch["num_predictions"].max()) for batch in read_packed(sorted(packs.glob("*.tf*"))[0]))
    flags = line(data, tmp_path / "out", input_file=f"{packs}/*.tfrecord", do_train="false")
    message = f"`max_predictions_per_seq` must be at least that of a sequence in {packs}"
    assert_refused(message, **{**flags, "max_predictions_per_seq": most - 1})
    assert pretrain(**{**flags, "max_predictions_per_seq": most}).status == 0
