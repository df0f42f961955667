"""The benchmark of training: its arithmetic by a clock that is told the time, honest baselines, its flags."""

import contextlib
import dataclasses
import json

import keras
import numpy as np
import pytest
from clock import Clock
from packs import packed_and_unpacked
from reference import import_reference
from tiny import CONFIG

from benchmarks import (
    benchmark_batches,
    benchmark_engine,
    peer_process,
    torch_reference,
    training_benchmark,
    training_ways,
)
from benchmarks.benchmark_batches import Batches
from benchmarks.synthetic_data import write_sequences
from bert_packed.config import ModelConfig
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from bert_packed.runs import interleaved_timing

SECONDS = {
    "plain": [2, 2, 4, 2, 2, 2, 2],
    "packed": [2.2, 2.4, 5.2, 2.8, 3.0, 3.2, 3.4],  # 10 % longer, 20 %, ... 70 %
    "unpacked": [3, 3, 6, 3, 3, 3, 3],
    "transformers": [6, 6, 12, 6, 6, 6, 6],
    "transformers, memory kept": [4, 4, 8, 4, 4, 4, 4],
}
PACKED = Batches(["packs 0", "packs 1"], sequences_per_row=2.0, tokens_per_row=60.0)
UNPACKED = Batches(["rows 0", "rows 1"], sequences_per_row=1.0, tokens_per_row=30.0)


class Engine:
    """Takes steps that last what the test says, and remembers their batches."""

    def __init__(self, clock, seconds, flops=0.0):
        self.batches = []
        self._step = clock.taking([100, *seconds], result={"num_sequences": 1.0})
        self._flops = flops

    def train_step(self, batch):
        self.batches.append(batch)
        return self._step()

    def count_train_step(self, batch):
        return {"flops": self._flops, "bytes accessed": 1000.0 + 10 * len(batch)}


@pytest.fixture
def tiny_config_file(tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=30522, num_hidden_layers=1, max_position_embeddings=64)
    path = tmp_path / "bert_config.json"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    return path


def command(*flags):
    module = training_benchmark
    return run(module.main, module.BenchmarkConfig, module.DESCRIPTION, ["training_benchmark", *flags])


def test_times_become_speeds_factors_and_an_interval(monkeypatch, tmp_path, tiny_config_file, capsys):
    clock, asked, running = Clock(), [], []
    engines = {name: Engine(clock, SECONDS[name]) for name in ("plain", "packed", "unpacked")}
    monkeypatch.setattr(interleaved_timing, "time", clock)
    monkeypatch.setattr(training_benchmark, "choose_backend", lambda: "tensorflow")
    monkeypatch.setattr(
        benchmark_batches, "make_batches", lambda *of: asked.append(of[1:]) or (PACKED, UNPACKED)
    )
    monkeypatch.setattr(training_ways, "our_engines", lambda *of: asked.append(of) or engines)

    @contextlib.contextmanager
    def torch_ways(*of):
        asked.append(of)
        (name,) = of[1]
        running.append(name)
        step = clock.taking([100, *SECONDS[name]])
        yield {name: lambda repeat: step() if name in running else pytest.fail("ended before")}
        running.remove(name)

    monkeypatch.setattr(training_ways, "torch_ways", torch_ways)
    monkeypatch.setattr(peer_process, "is_ours_to_set", lambda: True)
    table = tmp_path / "table.json"
    flags = {"bert_config_file": tiny_config_file, "batch_size": 4, "micro_batch_size": 2, "repeats": 7}
    flags |= {"max_seq_length": 64, "max_sequences_per_pack": 5, "input_file": "mine", "json": table}
    assert command(*(f"--{name}={value}" for name, value in flags.items()), "--reference") == 0

    rows = {row.pop("way"): list(row.values()) for row in json.loads(table.read_text())}
    # medians; 4 rows of 60 tokens, or of 30; medians of ratios
    assert rows == {
        "plain": [2, None, 1],
        "packed": [pytest.approx(3), pytest.approx(80), pytest.approx(1.4)],
        "unpacked": [3, 40, 1.5],
        "transformers": [6, 20, 3],
        "transformers, memory kept": [4, 30, 2],
    }
    assert not running
    printed = capsys.readouterr().out
    assert "packing factor 2.000\n" in printed
    assert "overhead of packing +40.00% of the step, quartiles +25.00% and +55.00%\n" in printed
    assert "its median is between +10.00% and +70.00%, with a confidence of 95 %" in printed
    # 1.5 / 1.4 of the time for twice the tokens
    assert "packed / unpacked: 2.14 times the tokens/s, 1.07 x the packing factor\n" in printed
    assert "packed / transformers: 4.29 times the tokens/s, 2.14 x the packing factor\n" in printed
    assert "memory kept: 2.86 times the tokens/s, 1.43 x the packing factor\n" in printed
    assert "by XLA's count" not in printed

    turned = [0, 0, 1, 0, 1, 0, 1, 0]  # the first to compile
    assert engines["plain"].batches == engines["packed"].batches == [f"packs {n}" for n in turned]
    assert engines["unpacked"].batches == [f"rows {n}" for n in turned]
    model_config = ModelConfig(**json.loads(tiny_config_file.read_text()))
    assert asked == [
        ("mine", 64, 5, 4, 2, model_config),
        (model_config, 2),
        (model_config, {"transformers": UNPACKED.batches}, False),
        (model_config, {"transformers, memory kept": UNPACKED.batches}, True),
    ]


def test_what_xla_counts_is_compared(capsys):
    clock = Clock()
    engines = {"plain": Engine(clock, [], flops=400.0), "packed": Engine(clock, [], flops=402.0)}
    data = {"plain": Batches([""], 1.0, 1.0), "packed": Batches(["x" * 5], 1.0, 1.0)}
    training_benchmark._print_counts(engines, data)
    assert "packing adds +0.500% of the operations and +5.000% of the bytes" in capsys.readouterr().out


def test_the_engines_are_what_they_are_called(monkeypatch):
    made = []
    for module in (training_ways, benchmark_engine):
        monkeypatch.setattr(module, "make_engine", lambda model, *_: made.append(_[-1]) or model)
    models = training_ways.our_engines(CONFIG, 3)
    assert list(models) == ["plain", "packed", "unpacked"] and made == [3, 3, 3]
    assert [type(model).__name__ for model in models.values()] == [
        "PlainBert",
        *["PackedBertForPretraining"] * 2,
    ]
    assert not any(model.bert.remat for name, model in models.items() if name != "plain")
    assert benchmark_engine.build_engine(CONFIG, remat=True).bert.remat


@pytest.mark.slow
@pytest.mark.both_backends
def test_a_measurement(tmp_path, tiny_config_file, capsys):
    """Nothing replaced: engines, packs and clock."""
    table = tmp_path / "table.json"
    flags = [f"--bert_config_file={tiny_config_file}", f"--json={table}", "--max_seq_length=64"]
    assert command(*flags, "--batch_size=2", "--micro_batch_size=1", "--repeats=1") == 0
    rows = {row["way"]: row for row in json.loads(table.read_text())}
    assert list(rows) == ["plain", "packed", "unpacked"]
    printed = capsys.readouterr().out
    factor = float(printed.split("packing factor ")[1].split()[0])
    assert 1.2 < factor < 3
    tokens = {name: rows[name]["real tokens/s"] * rows[name]["s/step"] for name in ("packed", "unpacked")}
    assert tokens["packed"] / tokens["unpacked"] == pytest.approx(factor, rel=1e-3)
    assert tokens["packed"] <= 2 * 64
    assert ("by XLA's count" in printed) == (keras.backend.backend() == "jax")


@pytest.mark.slow  # imports torch and transformers
def test_the_reference_computes_our_loss_and_trains():
    import_reference()
    _, rows = packed_and_unpacked()
    assert set(rows["slot_weights"].sum(axis=1)) == {1}
    with training_ways.torch_ways(CONFIG, {"torch": [rows]}) as ways:
        losses = [ways["torch"](repeat) for repeat in range(5)]
    assert losses[-1] < losses[0]


def test_steps_are_told_their_batch(monkeypatch):
    """Without torch: the batches in turn, as arguments of transformers, of the name that is asked for."""

    class Training:
        def __init__(self, model, learning_rate, weight_decay, max_grad_norm):
            assert (model, learning_rate, weight_decay, max_grad_norm) == (("folder", "Model"), 1e-4, 0.01, 1)

        def inputs(self, arguments):
            return f"inputs of {arguments}"

        def loss(self, inputs):
            return "loss", inputs

        def step(self, inputs):
            return "step", inputs

    monkeypatch.setattr(torch_reference, "read_model", lambda *of: of)
    monkeypatch.setattr(torch_reference, "TorchTraining", Training)
    batches = {"one": ["a", "b"], "other": ["c"]}
    steps = torch_reference.TorchSteps("folder", "Model", training_ways.ADAMW, batches)
    assert steps.loss("one") == ("loss", "inputs of a")
    assert [steps.step("one", repeat)[1][-1] for repeat in range(3)] == ["a", "b", "a"]
    assert steps.step("other", 1) == ("step", "inputs of c")


def test_a_reference_with_another_loss_is_refused(monkeypatch):
    """Without torch: what stands in for it computes our loss, or one that is a little off."""
    _, rows = packed_and_unpacked()
    losses, factor = [], 1.0

    @contextlib.contextmanager
    def hugging_face_folder(model):
        losses.append(factor * plain_loss(model, rows))
        yield "folder"

    class Peer(contextlib.nullcontext):
        def __init__(self, make, folder, name, recipe, batches, keeps_memory):
            super().__init__(self)
            made.append((make, folder, name, recipe, keeps_memory))
            ((arguments,),) = batches.values()
            np.testing.assert_array_equal(arguments["input_ids"], rows["token_ids"])

        def call(self, method, *of):
            return losses[-1] if method == "loss" else (method, *of)

    made = []
    monkeypatch.setattr(torch_reference, "hugging_face_folder", hugging_face_folder)
    monkeypatch.setattr(training_ways, "PeerProcess", Peer)
    with training_ways.torch_ways(CONFIG, {"torch": [rows]}, True) as ways:
        assert ways["torch"](3) == ("step", "torch", 3)
    asked = torch_reference.TorchSteps, "folder", "BertForPreTraining", training_ways.ADAMW
    assert made == [(*asked, True)]
    factor = 1.0003
    with (
        pytest.raises(InputError, match="`reference`, torch, must compute our loss"),
        training_ways.torch_ways(CONFIG, {"torch": [rows]}),
    ):
        pass
    assert made[1] == (*asked, False)


def plain_loss(model, rows):
    """Masked-LM loss per token and next-sentence loss per row, as `transformers` has it, by a loop."""
    outputs = {name: np.asarray(values, np.float64) for name, values in model(rows, training=False).items()}

    def nll(logits, label):
        return np.log(np.exp(logits).sum()) - logits[label]

    used = np.argwhere(rows["prediction_sequences"] > 0)
    mlm = [nll(outputs["mlm_logits"][row, p], rows["prediction_ids"][row, p]) for row, p in used]
    nsp = [
        nll(logits[0], label[0])
        for logits, label in zip(outputs["nsp_logits"], rows["nsp_labels"], strict=True)
    ]
    return float(np.mean(mlm) + np.mean(nsp))


def test_too_few_sequences_are_refused(tmp_path, tiny_config_file, capsys):
    paths = write_sequences(tmp_path / "few", 3, 64, num_files=1)
    flags = [f"--bert_config_file={tiny_config_file}", "--max_seq_length=64", f"--input_file={paths[0]}"]
    assert command(*flags) == 2
    assert "`input_file` must hold enough for 2 batches of 8 packs" in capsys.readouterr().err
