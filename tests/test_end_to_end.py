"""The main job in one piece: text, instances, packs, proof, and equal losses of packed and unpacked files."""

import dataclasses
import json

import numpy as np
import pytest
from tiny import CONFIG, make_engine, to_floats

from bert_packed.core import command_line
from bert_packed.data.batches import CheckedBatches
from bert_packed.data.input_pipeline import eval_batches
from bert_packed.objectives.objective import add_sums
from bert_packed.records.inputs import find_files
from bert_packed.records.record_rules import read_pack_spec
from data_gen import create_pretraining_data, pack_tfrecords, verify_tfrecords
from data_gen.pack_config import PackConfig
from data_gen.text.create_config import CreateConfig

MAX_SEQ_LENGTH = 48
WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]


def run(module, config_class, **flags):
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    return command_line.run(module.main, config_class, [module.__name__, *arguments])


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A text, taken through create, pack (at every depth and at depth 1) and verify."""
    folder = tmp_path_factory.mktemp("job")
    rng = np.random.default_rng(0)
    documents = [
        "\n".join(
            " ".join(rng.choice(WORDS[number % 7 :: 7], rng.integers(3, 9))) + "."
            for _ in range(rng.integers(1, 9))
        )
        for number in range(40)
    ]
    (folder / "text.txt").write_text("\n\n".join(documents))
    length = {"max_seq_length": MAX_SEQ_LENGTH, "num_workers": 1, "num_shards": 2}
    files = {"input_file": folder / "text.txt", "output_dir": folder / "instances"}
    sizes = {"vocab_size": 160, "dupe_factor": 2, "eval_fraction": 0}
    assert run(create_pretraining_data, CreateConfig, **files, **sizes, **length) == 0
    records = f"{folder}/instances/train-*.tfrecord"
    for name, depth in (("packed", "max"), ("unpacked", 1)):
        files = {"input_file": records, "output_dir": folder / name}
        assert run(pack_tfrecords, PackConfig, **files, **length, max_sequences_per_pack=depth) == 0
        files = {"input_file": records, "packed_file": f"{folder}/{name}/*.tfrecord"}
        assert run(verify_tfrecords, verify_tfrecords.VerifyConfig, **files) == 0
    return folder


def test_packs_hold_several_sequences(job):
    packed, unpacked = (
        json.loads((job / name / "manifest.json").read_text()) for name in ("packed", "unpacked")
    )
    assert packed["packing_factor"] > 1.3 and packed["depth"] >= 2
    assert unpacked["packing_factor"] == 1 and unpacked["spec"]["max_sequences_per_pack"] == 1
    assert packed["num_sequences"] == unpacked["num_sequences"] > 100


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("mlm_loss", ["per_sequence", "per_token"])
def test_packed_and_unpacked_files_give_the_same_figures(job, mlm_loss):
    vocab_size = json.loads((job / "instances" / "manifest.json").read_text())["vocab_size"]
    config = dataclasses.replace(CONFIG, vocab_size=vocab_size, max_position_embeddings=MAX_SEQ_LENGTH)
    engine = make_engine(mlm_loss, config)
    figures = []
    for name in ("packed", "unpacked"):
        files = find_files(f"{job}/{name}/*.tfrecord", "input_file")
        spec = read_pack_spec(files)
        total = {}
        for batch in CheckedBatches(eval_batches(files, spec, 16), files, spec, config):
            total = add_sums(total, to_floats(engine.eval_step(batch)))
        figures.append({**total, **engine.objective.means(total)})
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)
