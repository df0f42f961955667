"""Speed of training a Mamba in each way, by engines that take notes and told clocks, and transformers."""

import contextlib
import dataclasses

import numpy as np
import pytest
from clock import Clock
from mamba_batches import WAYS, RecordingEngine, tiny_batches
from next_tokens import CONFIG
from reference import import_reference

from benchmarks import mamba_speed, training_ways
from benchmarks.mamba_speed import REFERENCE
from benchmarks.sequence_batches import PACKED, PADDED, SINGLE
from benchmarks.torch_reference import TorchSteps
from bert_packed.core.settings import InputError
from bert_packed.objectives.next_tokens import next_token_objective
from bert_packed.runs import interleaved_timing


def test_a_turn_trains_once_on_every_batch(monkeypatch):
    batches, made = tiny_batches(), []
    make = lambda config: made.append(RecordingEngine(config)) or made[-1]  # noqa: E731
    monkeypatch.setattr(mamba_speed, "make_mamba_engine", make)
    ways = mamba_speed.training_ways(CONFIG, batches)
    assert tuple(ways) == WAYS
    for way in ways.values():
        way(0)
    (engine,) = made
    assert engine.batches == [batch for way in WAYS for batch in batches[way].batches]
    assert engine.config == CONFIG


SECONDS = {
    SINGLE: [12, 12, 24, 12, 12, 12, 12],
    PADDED: [6, 6, 12, 6, 6, 6, 6],
    PACKED: [2, 2, 4, 2, 2, 2, 4],
    REFERENCE: [10, 10, 20, 10, 10, 10, 10],
}


def test_times_become_speeds_and_comparisons(monkeypatch):
    clock, batches, asked = Clock(), tiny_batches(), []
    monkeypatch.setattr(interleaved_timing, "time", clock)
    ways = {way: clock.taking([100, *SECONDS[way]]) for way in WAYS}
    monkeypatch.setattr(mamba_speed, "training_ways", lambda *of: asked.append(of) or ways)
    rows, comparisons = mamba_speed.measure_training(CONFIG, batches, 7)
    assert asked == [(CONFIG, batches)]
    assert {row["way"]: (row["s"], row["real tokens/s"], row["gain"]) for row in rows} == {
        SINGLE: (12, pytest.approx(28 / 12), pytest.approx(1)),
        PADDED: (6, pytest.approx(28 / 6), pytest.approx(2)),
        PACKED: (2, pytest.approx(14), pytest.approx(6)),
    }
    padding = {row["way"]: row["padding, %"] for row in rows}
    assert padding[PACKED] == pytest.approx(100 * 4 / 32)
    # median, its interval, what is asked
    assert {row.pop("packed against"): list(row.values()) for row in comparisons} == {
        SINGLE: pytest.approx([6, 3, 6, 3.06]),
        PADDED: pytest.approx([3, 1.5, 3, 0.95 * 54 / 32]),
    }


def test_transformers_is_compared_by_token(monkeypatch):
    """It has half of the tokens that our packs have."""
    from benchmarks import mamba_reference

    clock, batches, asked = Clock(), tiny_batches(), []

    @contextlib.contextmanager
    def reference(rows, config):
        asked.append((rows["token_ids"].tolist(), config))
        train = clock.taking([100, *SECONDS[REFERENCE]])
        yield mamba_reference.Reference(train, 14, 0.25, {"path": "slow"})

    monkeypatch.setattr(interleaved_timing, "time", clock)
    monkeypatch.setattr(mamba_reference, "causal_training", reference)
    monkeypatch.setattr(mamba_speed, "make_mamba_engine", RecordingEngine)
    monkeypatch.setattr(mamba_speed, "training", lambda _, packs: clock.taking([100, *SECONDS[PACKED]]))
    row, compared = mamba_speed.measure_reference(CONFIG, batches, 1, 7)
    assert asked == [(batches[PADDED].batches[0]["token_ids"][:1].tolist(), CONFIG)]
    want = {"path": "slow", "rows": 1, "padding, %": 25, "s": 10, "real tokens/s": 1.4}
    assert row == pytest.approx(want)
    assert list(compared.values()) == [REFERENCE, *map(pytest.approx, (10, 5, 10)), 3]


def test_memory_is_told_by_length(monkeypatch):
    class Engine:
        def step_programs(self, batch):
            self.size = batch["token_ids"].size
            assert self.size == batch["sequence_ids"].sum()  # one full sequence
            return [mamba_program(3 * 2**20 + 2048 * self.size)]

    def mamba_program(size):
        return type("Program", (), {"temporary_bytes": size})

    monkeypatch.setattr(mamba_speed, "make_mamba_engine", lambda _: Engine())
    rows = mamba_speed.step_memory(CONFIG, [512, 1024])
    assert [list(row.values()) for row in rows] == [[512, 4, 8], [1024, 5, 5]]


@pytest.mark.slow
@pytest.mark.both_backends
def test_memory_grows_as_the_length_does(monkeypatch):
    """Compiled, at full optimisation: states are kept at the borders of chunks alone."""
    config = dataclasses.replace(CONFIG, hidden_size=32, state_size=16)
    first, _, last = (row["temporaries, MiB"] for row in mamba_speed.step_memory(config, [256, 512, 1024]))
    if first is None:
        pytest.skip("this TensorFlow does not tell what a program holds")
    assert last / first < 4.4


@pytest.mark.slow  # imports torch and transformers
def test_the_reference_computes_our_loss_and_trains():
    import_reference()
    from benchmarks.mamba_reference import causal_arguments_of, causal_training

    batch = tiny_batches()[PADDED].batches[0]
    arguments = causal_arguments_of(batch)
    lengths = (batch["sequence_ids"] > 0).sum(axis=1)
    assert arguments["input_ids"].shape == (2, lengths.max())
    assert ((arguments["labels"] != -100).sum(axis=1) == lengths).all()
    with causal_training(batch, CONFIG) as found:
        assert found.num_tokens == lengths.sum() and found.padding == 1 - np.mean(lengths) / lengths.max()
        # forward and backward a product of each state with C, for every token of every block
        assert found.path["watched tokens"] == lengths.max()
        assert found.path["bmm calls"] == 3 * lengths.max() * CONFIG.num_hidden_layers
        assert found.path["path"] == "slow: token by token in Python"
        losses = [found.train(repeat) for repeat in range(2)]
        assert losses[1] < losses[0]


def test_a_step_without_a_loop_is_no_slow_path():
    from benchmarks.mamba_reference import path_row

    row = path_row(num_tokens=5, num_blocks=2, num_products=9)
    assert (row["path"], row["bmm calls"], row["watched tokens"]) == ("not token by token", 9, 5)
    assert path_row(5, 2, 10)["path"] == "slow: token by token in Python"


def test_products_are_counted_on_the_first_tokens():
    torch, _ = import_reference()

    class Training:
        def step(self, given):
            self.shape = given["input_ids"].shape
            torch.bmm(given["input_ids"], given["input_ids"])
            return given["input_ids"][0] @ given["input_ids"][0]  # of matrices, not of batches

    steps = TorchSteps.__new__(TorchSteps)
    steps._training, steps._batches = Training(), {"rows": [{"input_ids": torch.ones(2, 7, 3)}]}
    assert steps.count_products("rows", 3) == 1 and steps._training.shape == (2, 3, 3)


def test_a_reference_with_another_loss_is_refused(monkeypatch):
    from benchmarks import mamba_reference

    class Peer(contextlib.nullcontext):
        def __init__(self, make, folder, name, recipe, batches):
            super().__init__(self)
            made.append((make, name, recipe, batches["rows"][0]["input_ids"].shape))

        def call(self, method, *of):
            return losses[0] if method == "loss" else 7

    made, batch = [], tiny_batches()[PADDED].batches[0]
    objective = next_token_objective("per_token")
    model = objective.build_model(CONFIG, seed=0)
    sums = objective.sums(model(batch, training=False), batch)
    losses = [float(objective.loss(sums, objective.denominators(objective.counts(batch))))]
    monkeypatch.setattr(mamba_reference, "PeerProcess", Peer)
    with mamba_reference.causal_training(batch, CONFIG) as found:
        assert found.path["bmm calls"] == 7
    longest = (batch["sequence_ids"] > 0).sum(axis=1).max()
    assert made == [(TorchSteps, "MambaForCausalLM", training_ways.ADAMW, (2, longest))]
    losses[0] *= 1.0003
    refused = pytest.raises(InputError, match="`reference`, torch, must compute our loss")
    with refused, mamba_reference.causal_training(batch, CONFIG):
        pass
