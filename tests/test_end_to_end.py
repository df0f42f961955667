"""The main job in one piece: text, instances, packs, proof, training; packed and unpacked losses agree."""

import dataclasses
import json

import numpy as np
import pytest
from tiny import CONFIG, make_engine, to_floats

from bert_packed import cli
from bert_packed.core.settings import InputError
from bert_packed.data.batches import CheckedBatches
from bert_packed.data.input_pipeline import eval_batches
from bert_packed.objectives.objective import add_sums
from bert_packed.records.first_records import read_pack_spec
from bert_packed.records.inputs import find_files
from bert_packed.training.metrics_log import read_rows

MAX_SEQ_LENGTH = 48
WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]


def run(name, **flags):
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    return cli.run_command(name, [name, *arguments])


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A text, taken through create, pack (packed and at depth 1) and verify."""
    folder = tmp_path_factory.mktemp("job")
    rng = np.random.default_rng(0)
    documents = [
        "\n".join(
            " ".join(rng.choice(WORDS[number % 7 :: 7], rng.integers(3, 9))) + "."
            for _ in range(rng.integers(1, 9))
        )
        for number in range(60)
    ]
    (folder / "text.txt").write_text("\n\n".join(documents))
    status = run(
        "create",
        input_file=folder / "text.txt",
        output_dir=folder / "instances",
        max_seq_length=MAX_SEQ_LENGTH,
        vocab_size=160,
        dupe_factor=2,
        eval_fraction=0.2,
        num_workers=1,
        num_shards=2,
    )
    assert status == 0
    for split in ("train", "eval"):
        for name, depth in (("packed", "max"), ("unpacked", 1)):
            target = folder / name / split
            status = run(
                "pack",
                input_file=f"{folder}/instances/{split}-*.tfrecord",
                output_dir=target,
                max_seq_length=MAX_SEQ_LENGTH,
                max_sequences_per_pack=depth,
            )
            assert status == 0
            status = run(
                "verify",
                input_file=f"{folder}/instances/{split}-*.tfrecord",
                packed_file=f"{target}/*.tfrecord",
            )
            assert status == 0
    return folder


def test_packs_hold_several_sequences(job):
    packed, unpacked = (
        json.loads((job / name / "train" / "manifest.json").read_text()) for name in ("packed", "unpacked")
    )
    assert packed["packing_factor"] > 1.3 and packed["depth"] >= 2
    assert unpacked["packing_factor"] == 1 and unpacked["spec"]["max_sequences_per_pack"] == 1
    assert packed["num_sequences"] == unpacked["num_sequences"] > 100


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("mlm_loss", ["per_sequence", "per_token"])
def test_packed_and_unpacked_files_give_the_same_figures(job, mlm_loss):
    config = _with_vocabulary(job)
    engine = make_engine(mlm_loss, config)
    figures = []
    for name in ("packed", "unpacked"):
        files = find_files(f"{job}/{name}/eval/*.tfrecord", "eval_input_file")
        spec = read_pack_spec(files)
        total = {}
        for batch in CheckedBatches(eval_batches(files, spec, 4), files, spec, config):
            total = add_sums(total, to_floats(engine.eval_step(batch)))
        figures.append({**total, **engine.objective.means(total)})
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


def test_training_learns(job):
    folder = job / "run"
    config = dataclasses.replace(_with_vocabulary(job), num_hidden_layers=1)
    (job / "bert_config.json").write_text(json.dumps(vars(config)))
    status = run(
        "pretrain",
        input_file=f"{job}/packed/train/*.tfrecord",
        eval_input_file=f"{job}/packed/eval/*.tfrecord",
        output_dir=folder,
        bert_config_file=job / "bert_config.json",
        train_batch_size=8,
        num_train_steps=60,
        num_warmup_steps=5,
        learning_rate=0.02,
        packing_correction="betas",
    )
    assert status == 0
    rows = read_rows(folder / "metrics.csv")
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) - 0.2
    held_out = read_rows(folder / "eval_metrics.csv")[-1]
    assert float(held_out["loss"]) < float(rows[0]["loss"])
    manifest = json.loads((job / "packed" / "eval" / "manifest.json").read_text())
    assert int(held_out["num_sequences"]) == manifest["num_sequences"]


def test_unpacked_records_are_refused_with_the_command(job, capsys):
    flags = {"input_file": f"{job}/instances/train-*.tfrecord", "output_dir": job / "refused"}
    assert run("pretrain", **flags) == 2
    message = capsys.readouterr().err
    assert "python data_gen/pack_tfrecords.py --input_file=" in message and message.count("\n") == 1
    with pytest.raises(InputError, match="holds unpacked records"):
        read_pack_spec(find_files(flags["input_file"], "input_file"))


def _with_vocabulary(job):
    vocab_size = json.loads((job / "instances" / "manifest.json").read_text())["vocab_size"]
    return dataclasses.replace(CONFIG, vocab_size=vocab_size, max_position_embeddings=MAX_SEQ_LENGTH)
