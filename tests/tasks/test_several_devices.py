"""Runs whose steps two devices share: losses, scores and weights of one device, also where a run goes on.

The faults that this file alone catches: packs of a step that no device takes, empty packs that count, a model
on several devices that cannot predict, other dropout where a run goes on with more devices.
"""

import dataclasses
import json
import re
import shutil

import keras
import numpy as np
import pytest
from encoder_files import WORDS, write_encoder
from logical_devices import divide_processor
from pretraining_command import newest_checkpoint, read_rows
from safetensors.numpy import load_file
from tiny import SHALLOW
from uncompiled import run_uncompiled

import bert_packed
from bert_packed.core.settings import InputError
from bert_packed.parallel.replicas import make_replicas
from bert_packed.tasks import run
from bert_packed.tasks.classify.config import ClassifyConfig
from bert_packed.tasks.embed.config import EmbedConfig

pytestmark = pytest.mark.both_backends
NUM_DEVICES, LENGTH = 2, 24
tf_slow = [pytest.mark.slow] if keras.backend.backend() == "tensorflow" else []  # a minute
CONFIGS = {"classify": ClassifyConfig, "embed": EmbedConfig}


@pytest.fixture(scope="module", autouse=True)
def devices():
    divide_processor(NUM_DEVICES)


@pytest.fixture(scope="module")
def files(devices, tmp_path_factory):
    """Texts whose label is the first word, pairs of texts with a score, and a start."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, size)) for size in rng.integers(2, 8, 40)]
    rows = [{"text": text, "label": "ab"[text < "w2"]} for text in texts]
    pairs = [
        {"sentence1": one, "sentence2": other, "score": number % 5}
        for number, (one, other) in enumerate(zip(texts[::2], texts[1::2], strict=True))
    ]
    for name, lines in (("classify", rows), ("embed", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_encoder(folder / "start", SHALLOW)
    return folder


def config_of(task, files, output_dir, **changes):
    path = str(files / f"{task}.jsonl")
    settings = {
        "train_file": path,
        "eval_file": path,
        "init_checkpoint": str(files / "start"),
        "output_dir": str(output_dir),
        "max_seq_length": LENGTH,
        "train_batch_size": 10 if task == "classify" else 7,
        "learning_rate": 0.002,
        "num_train_epochs": 1.0,
        "eval_steps": 2,
        "keep_best": True,
        "log_steps": 1,
        "save_checkpoints_steps": 2,
        "keep_checkpoint_max": 9,
        "hidden_dropout_prob": 0.2,
        "attention_probs_dropout_prob": 0.2,
        **changes,
    }
    return CONFIGS[task](**settings)


def assert_close(found, want):
    """Rows of both logs, and the weights of the last step and of the best."""
    for name in ("metrics.csv", "eval_metrics.csv"):
        for row, other in zip(read_rows(found / name), read_rows(want / name), strict=True):
            # Empty packs that fill up a step are positions, too
            row, other = (
                {key: float(value) for key, value in of.items() if value and key != "packing_efficiency"}
                for of in (row, other)
            )
            assert row == pytest.approx(other, rel=1e-5, abs=1e-5), name
    for path in (newest_checkpoint(want), want / "model"):
        weights, others = (
            load_file(folder / path.relative_to(want) / "model.safetensors") for folder in (found, want)
        )
        for name, values in others.items():
            if not name.endswith(("key/bias", "key.bias")):  # of whose rounding Adam makes whole steps
                np.testing.assert_allclose(weights[name], values, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("task", [pytest.param("classify", marks=tf_slow), "embed"])
def test_a_run_on_two_devices_is_that_of_one(task, files, tmp_path, monkeypatch, capsys):
    engines, make_engine = [], run.make_engine
    monkeypatch.setattr(run, "make_engine", lambda *of: engines.append(make_engine(*of)) or engines[-1])
    one, two, moved = (tmp_path / name for name in ("one", "two", "moved"))
    with run_uncompiled():
        want = bert_packed.finetune(config_of(task, files, one))
    packs = int(re.search(r"in at most (\d+) packs, all at once", capsys.readouterr().out)[1])
    assert packs % NUM_DEVICES  # so that an empty one fills up a step
    config = config_of(task, files, two, distribution="mirrored")
    found = bert_packed.finetune(config)
    assert found.scores == pytest.approx(want.scores, abs=1e-3)
    assert_close(two, one)
    if task == "classify":  # a run of one device goes on with two
        shutil.copytree(one, moved)
        shutil.rmtree(newest_checkpoint(moved))
        shutil.rmtree(moved / "model")
        again = bert_packed.finetune(dataclasses.replace(config, output_dir=str(moved)))
        assert again.scores == pytest.approx(want.scores, abs=1e-3)
        assert_close(moved, one)
    numbers = [engine.replicas and engine.replicas.num for engine in engines]
    assert numbers[0] is None and {*numbers[1:]} == {NUM_DEVICES}
    assert make_replicas("mirrored") == make_replicas("mirrored")  # whose collectives TensorFlow numbers
    with pytest.raises(InputError, match="`micro_batch_size` must be divisible by the number of devices"):
        bert_packed.finetune(config_of(task, files, one, distribution="mirrored", micro_batch_size=1))
