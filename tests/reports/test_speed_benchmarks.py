"""The benchmarks of training and inference: honest baselines, the arithmetic, and tables for programs."""

import dataclasses
import json
import sys

import keras
import numpy as np
import pytest
from packs import batch_of, random_sequence
from test_inference import TEXTS, model_folder  # noqa: F401
from test_reference import import_reference
from tiny import CONFIG, make_engine

from bert_packed import export
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.reports import inference_benchmark, plain_bert, step_memory, training_benchmark
from bert_packed.runs.turns import median_interval, median_ratio, quartiles, time_in_turns
from bert_packed.training.engines.variables import named_weights
from data_gen.cli.command_line import run
from data_gen.cli.settings import InputError

MAX_SEQ_LENGTH = 24
PLAIN_NAMES = {
    "embeddings": "bert/embeddings",
    "layer": "bert/layer",
    "pooler": "next_sentence/pooler",
    "classifier": "next_sentence/classifier",
}


def test_turns_warm_up_once_and_turn_the_order_round():
    calls = []
    seconds = time_in_turns({name: lambda n, name=name: calls.append((name, n)) for name in "ab"}, 3)
    assert calls == [("a", 0), ("b", 0), ("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_ratio_is_of_neighbouring_times():
    # the machine slows down threefold in the middle: the ratio stays
    assert median_ratio([2, 6, 2], [1, 3, 1]) == 2


def test_quartiles():
    assert quartiles([4, 1, 3, 2, 5]) == [2, 3, 4]
    assert quartiles([7]) == [7, 7, 7]


def test_median_interval():
    # of 25 values the 8th and the 18th: the table of every textbook for the sign test
    assert median_interval(list(range(24, -1, -1))) == (7, 17)
    assert median_interval(list(range(6))) == (0, 5)
    assert median_interval([3]) == (3, 3)


def test_median_interval_holds_the_median_as_often_as_it_says():
    samples = np.random.default_rng(0).exponential(size=(2000, 30))
    intervals = [median_interval(list(sample)) for sample in samples]
    share = np.mean([low <= np.log(2) <= high for low, high in intervals])
    assert 0.94 < share < 0.97


def our_path(plain_path):
    for plain, ours in PLAIN_NAMES.items():
        if plain_path.startswith(plain):
            return ours + plain_path.removeprefix(plain)
    return plain_path


def test_plain_bert_is_our_bert_on_single_sequences():
    rng = np.random.default_rng(0)
    rows = [[random_sequence(rng, length)] for length in (MAX_SEQ_LENGTH, 9, 17)]
    batch = batch_of(rows, MAX_SEQ_LENGTH, num_slots=1, num_predictions=8)
    weights = make_engine().model
    plain = plain_bert.PlainBert(CONFIG)
    plain.build()
    ours = named_weights(weights)
    theirs = {our_path(name): weight for name, weight in named_weights(plain).items()}
    assert theirs.keys() == ours.keys()
    for name, weight in theirs.items():
        weight.assign(ours[name])
    outputs, expected = plain(batch), weights(batch)
    np.testing.assert_allclose(outputs["nsp_logits"], expected["nsp_logits"][:, 0], atol=1e-5)
    used = batch["prediction_sequences"] > 0
    got, want = np.asarray(outputs["mlm_logits"])[used], np.asarray(expected["mlm_logits"])[used]
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    theirs, ours = plain_bert.plain_objective(), pretraining_objective("per_token")
    got, want = theirs.sums(outputs, batch), ours.sums(expected, batch)
    assert set(theirs.sum_names) == set(got) and theirs.losses == ours.losses
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, err_msg=name)


@pytest.fixture
def tiny_config_file(tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=30522, max_position_embeddings=64)
    path = tmp_path / "bert_config.json"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    return path


def run_training_benchmark(tmp_path, config_file, *more):
    flags = {"bert_config_file": config_file, "batch_size": 2, "max_seq_length": 64, "repeats": 2}
    flags |= {"json": tmp_path / "table.json"}
    argv = ["training_benchmark", *(f"--{name}={value}" for name, value in flags.items()), *more]
    module = training_benchmark
    assert run(module.main, module.BenchmarkConfig, module.DESCRIPTION, argv) == 0
    return {row["way"]: row for row in json.loads((tmp_path / "table.json").read_text())}


@pytest.mark.both_backends
def test_training_benchmark(tmp_path, tiny_config_file, capsys):
    rows = run_training_benchmark(tmp_path, tiny_config_file, "--micro_batch_size=1")
    assert list(rows) == ["plain", "packed", "unpacked"]
    assert rows["plain"]["step time, plain = 1"] == 1
    assert all(row["s/step"] > 0 for row in rows.values())
    printed = capsys.readouterr().out
    factor = float(printed.split("packing factor ")[1].split()[0])
    assert 1.2 < factor < 3
    assert "overhead of packing" in printed
    assert ("by XLA's count" in printed) == (keras.backend.backend() == "jax")


def test_training_benchmark_against_the_reference(tmp_path, tiny_config_file, capsys):
    import_reference()
    rows = run_training_benchmark(tmp_path, tiny_config_file, "--reference")
    assert rows["transformers"]["real tokens/s"] > 0
    assert "packed / transformers" in capsys.readouterr().out


def test_training_benchmark_refuses_too_few_sequences(tmp_path, tiny_config_file, capsys):
    from bert_packed.reports.synthetic_data import write_sequences

    paths = write_sequences(tmp_path / "few", 3, 64, num_files=1)
    argv = ["b", f"--bert_config_file={tiny_config_file}", "--max_seq_length=64", f"--input_file={paths[0]}"]
    module = training_benchmark
    assert run(module.main, module.BenchmarkConfig, module.DESCRIPTION, argv) == 2
    assert "`input_file` must hold enough for 2 batches of 8 packs" in capsys.readouterr().err


def test_inference_benchmark(tmp_path, model_folder, capsys):  # noqa: F811
    import_reference()
    text_file, hugging_face = tmp_path / "texts.txt", tmp_path / "hf"
    text_file.write_text("\n".join(text for text in TEXTS if text) + "\n")
    argv = ["export", f"--init_checkpoint={model_folder}", f"--output_dir={hugging_face}"]
    argv.append(f"--vocab_file={model_folder / 'vocab.txt'}")
    assert run(export.main, export.ExportConfig, export.DESCRIPTION, argv) == 0
    flags = {"init_checkpoint": hugging_face, "vocab_file": model_folder / "vocab.txt"}
    flags |= {"text_file": text_file, "max_seq_length": 24, "batch_size": 2, "repeats": 1}
    flags |= {"json": tmp_path / "table.json"}
    argv = ["benchmark", *(f"--{name}={value}" for name, value in flags.items()), "--reference"]
    module = inference_benchmark
    assert run(module.main, module.BenchmarkConfig, module.DESCRIPTION, argv) == 0
    rows = json.loads((tmp_path / "table.json").read_text())
    names = ["packed", "padded", "transformers, padded to 24", "transformers, padded to the longest"]
    assert [row["way"] for row in rows] == names
    assert all(row["texts/s"] > 0 for row in rows)
    assert rows[0]["packed / this"] == 1
    assert "8 texts, packing factor 2.667" in capsys.readouterr().out


def test_inference_benchmark_notices_other_vectors():
    ways = {"packed": lambda: np.ones((2, 3)), "theirs": lambda: np.full((2, 3), 1.001)}
    with pytest.raises(InputError, match=r"must give our vectors.*theirs"):
        inference_benchmark._check_agreement(ways)


@pytest.mark.both_backends
def test_step_memory(tmp_path, tiny_config_file, capsys):
    flags = {"bert_config_file": tiny_config_file, "max_seq_length": 64, "batch_size": 4}
    flags |= {"micro_batch_size": 2, "json": tmp_path / "table.json"}
    argv = ["step_memory", *(f"--{name}={value}" for name, value in flags.items()), "--remat"]
    assert run(step_memory.main, step_memory.MemoryConfig, step_memory.DESCRIPTION, argv) == 0
    (row,) = json.loads((tmp_path / "table.json").read_text())
    assert row["remat"] == "true"
    if sys.platform == "linux":
        assert row["process, MiB"] > 0
    assert (row.get("temporaries, MiB", 0) > 0) == (keras.backend.backend() == "jax")
    argv.append("--micro_batch_size=3")
    assert run(step_memory.main, step_memory.MemoryConfig, step_memory.DESCRIPTION, argv) == 2
    assert (
        "`micro_batch_size` must divide `batch_size`. Received: micro_batch_size=3, batch_size=4"
        in capsys.readouterr().err
    )
