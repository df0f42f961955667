"""The report on Mambas: padding rates by plain loops, the same sequences in every way, told clocks, flags."""

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from clock import Clock
from next_tokens import CONFIG, VOCAB_SIZE
from reference import import_reference

from bert_packed.config import config_json
from bert_packed.reports import mamba_speed, packmamba
from bert_packed.reports.mamba_speed import NO_RESETS, REFERENCE
from bert_packed.reports.padding_rates import draw_lengths, padding_rates
from bert_packed.reports.sequence_batches import (
    PACKED,
    PADDED,
    SINGLE,
    best_shapes,
    choose_packs,
    make_batches,
)
from bert_packed.runs import turns
from data_gen.cli.command_line import run
from data_gen.cli.settings import InputError

PACKS = [(1, 2, 5), (3, 4), (6,), (2, 2, 3)]
WAYS = (SINGLE, PADDED, PACKED)


def tiny_batches():
    return make_batches(PACKS, 8, 6, 2, 3, VOCAB_SIZE)


def command(*flags):
    module = packmamba
    return run(module.main, module.PackMambaConfig, module.DESCRIPTION, ["packmamba", *flags])


@pytest.mark.parametrize("num_shapes", [1, 2, 3, 9])
def test_the_best_shapes_are_those_of_all_choices(num_shapes):
    lengths = np.random.default_rng(num_shapes).integers(1, 30, 12)
    values = np.unique(lengths)
    costs = [
        sum(min(shape for shape in shapes if shape >= length) for length in lengths)
        for count in range(1, min(num_shapes, len(values)) + 1)
        for shapes in itertools.combinations(values, count)
        if max(shapes) == max(values)
    ]
    shapes = best_shapes(lengths, num_shapes)
    assert len(shapes) <= num_shapes and shapes[-1] == max(lengths)
    assert sum(shapes[np.searchsorted(shapes, lengths)]) == min(costs)


def test_chosen_sequences_fill_the_packs_and_have_the_spread_of_all():
    assert choose_packs([1, 1, 2, 2, 2, 2, 3, 5], 5, 2) == [(1, 2, 2), (5,)]
    lengths = draw_lengths(5000, seed=0)
    packs = choose_packs(lengths, 4096, 4)
    chosen = [length for pack in packs for length in pack]
    assert len(packs) == 4 and all(sum(pack) <= 4096 for pack in packs)
    assert sum(chosen) > 0.95 * 4 * 4096
    assert np.mean(chosen) == pytest.approx(np.mean(lengths), rel=0.03)
    assert np.std(chosen) == pytest.approx(np.std(lengths), rel=0.1)
    with pytest.raises(InputError, match=r"must hold enough to fill 3 packs of 8\. Received: 4 sequences"):
        choose_packs([3, 4, 5, 2], 8, 3)


def sequences_of(batch):
    """The tokens of each sequence, after a check that each predicts its own next, by a loop."""
    for row in range(len(batch["token_ids"])):
        ids = batch["sequence_ids"][row]
        assert batch["slot_weights"][row].sum() == ids.max()
        for slot in range(1, ids.max() + 1):
            here = np.flatnonzero(ids == slot)
            tokens = batch["token_ids"][row, here]
            assert here.tolist() == list(range(here[0], here[0] + len(here)))
            assert batch["position_ids"][row, here].tolist() == list(range(len(here)))
            assert batch["label_ids"][row, here].tolist() == [*tokens[1:], 0]
            assert batch["label_sequences"][row, here].tolist() == [slot] * (len(here) - 1) + [0]
            yield tuple(tokens.tolist())


def test_every_sequence_is_once_in_each_way():
    batches = tiny_batches()
    found = {
        way: Counter(one for batch in some.batches for one in sequences_of(batch))
        for way, some in batches.items()
    }
    assert tuple(found) == WAYS
    assert found[SINGLE] == found[PADDED] == found[PACKED]
    assert sorted(map(len, found[PACKED].elements())) == sorted(itertools.chain(*PACKS))
    shapes = {way: [batch["token_ids"].shape for batch in some.batches] for way, some in batches.items()}
    assert shapes[PACKED] == [(2, 8)] * 2
    assert shapes[PADDED] == [(2, 6)] * 4 + [(1, 6)]  # as many tokens at once as 2 packs of 8 hold
    assert len(set(shapes[SINGLE])) == 3 and {rows for rows, _ in shapes[SINGLE]} == {1}
    assert batches[PACKED].padding == pytest.approx(1 - 28 / 32)
    assert batches[PADDED].padding == pytest.approx(1 - 28 / 54)


@pytest.mark.both_backends
def test_the_losses_of_all_sequences_are_the_same_in_each_way(uncompiled):
    """The model is one, so what is timed is the same work; without resets it is not."""
    batches = make_batches([(1, 2, 3), (5,)], 6, 5, 2, 2, VOCAB_SIZE)
    names = ("lm_nll", "lm_sequence_nll", "num_predictions", "num_sequences", "num_bytes")

    def totals(config, way):
        engine = mamba_speed.make_mamba_engine(config)
        sums = [engine.eval_step(batch) for batch in batches[way].batches]
        return [sum(float(one[name]) for one in sums) for name in names]

    found = [totals(CONFIG, way) for way in WAYS]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] == pytest.approx(found[2], rel=1e-5)
    assert found[0][2:] == [7, 4, 11]
    without = totals(dataclasses.replace(CONFIG, ablation_no_position_reset=True), PACKED)
    assert abs(without[0] / found[2][0] - 1) > 1e-5


def test_a_turn_trains_once_on_every_batch(monkeypatch):
    batches, made = tiny_batches(), []

    class Engine:
        def __init__(self, config):
            self.batches, self.config = [], config
            made.append(self)

        def train_step(self, batch):
            self.batches.append(batch)
            return {"num_sequences": 1.0}

    monkeypatch.setattr(mamba_speed, "make_mamba_engine", Engine)
    ways = mamba_speed.training_ways(CONFIG, batches)
    assert tuple(ways) == (*WAYS, NO_RESETS)
    engine, without = made
    assert [one.config.ablation_no_position_reset for one in made] == [False, True]
    for way in ways.values():
        way(0)
    assert engine.batches == [batch for way in WAYS for batch in batches[way].batches]
    assert without.batches == batches[PACKED].batches


@pytest.mark.both_backends
def test_operators_run_forward_and_backward_on_the_shapes_of_each_way(monkeypatch):
    batches, seen = make_batches([(1, 3), (2, 2)], 4, 3, 1, 2, VOCAB_SIZE), []

    def compiled(function):
        def program(given, positions, weights):
            gradients = function(given, positions, weights)
            seen.append((np.asarray(positions), given, gradients))
            return gradients

        return program

    monkeypatch.setattr(mamba_speed, "compiled", compiled)
    for name, num_inputs in (("convolution", 3), ("scan", 5)):
        ways = mamba_speed.operator_ways(CONFIG, batches)[name]
        assert tuple(ways) == WAYS
        for way, run_way in ways.items():
            seen.clear()
            run_way(0)
            assert len(seen) == len(batches[way].batches)
            for (positions, given, gradients), batch in zip(seen, batches[way].batches, strict=True):
                assert (positions == batch["position_ids"]).all()
                assert len(given) == num_inputs and given[0].shape == (*positions.shape, CONFIG.inner_size)
                assert [one.shape for one in gradients] == [one.shape for one in given]
                # a token alone in its row carries no state, and its decay is of no consequence
                assert all(np.abs(np.asarray(one)).max() > 0 for one in gradients) or positions.max() == 0


SECONDS = {
    SINGLE: [12, 12, 24, 12, 12, 12, 12],
    PADDED: [6, 6, 12, 6, 6, 6, 6],
    PACKED: [2, 2, 4, 2, 2, 2, 4],
    NO_RESETS: [2, 2, 4, 2, 2, 2, 2],
    REFERENCE: [20, 20, 40, 20, 20, 20, 20],
}


def test_times_become_speeds_and_comparisons(monkeypatch):
    clock, batches, asked = Clock(), tiny_batches(), []

    def reference(rows, config):
        asked.append((rows, config))
        return batches[PADDED], clock.taking([100, *SECONDS[REFERENCE]])

    monkeypatch.setattr(turns, "time", clock)
    ways = {way: clock.taking([100, *SECONDS[way]]) for way in (*WAYS, NO_RESETS)}
    monkeypatch.setattr(mamba_speed, "training_ways", lambda *of: asked.append(of) or ways)
    from bert_packed.reports import mamba_reference

    monkeypatch.setattr(mamba_reference, "causal_training", reference)
    rows, comparisons = mamba_speed.measure_training(CONFIG, batches, 7, reference=True)
    assert asked == [(CONFIG, batches), (batches[PADDED].batches, CONFIG)]
    assert {row["way"]: (row["s"], row["real tokens/s"], row["gain"]) for row in rows} == {
        SINGLE: (12, pytest.approx(28 / 12), 1),
        PADDED: (6, pytest.approx(28 / 6), 2),
        PACKED: (2, 14, 6),
        NO_RESETS: (2, 14, 6),
        REFERENCE: (20, 1.4, 0.6),
    }
    assert {row["way"]: row["padding, %"] for row in rows}[NO_RESETS] == pytest.approx(100 * 4 / 32)
    found = {row.pop("packed against"): list(row.values()) for row in comparisons}
    # median, its interval, what is asked
    assert found == {
        SINGLE: [6, 3, 6, 3.06],
        PADDED: [3, 1.5, 3, pytest.approx(0.95 * 54 / 32)],
        NO_RESETS: [1, 0.5, 1, pytest.approx(1 / 1.02)],
        REFERENCE: [10, 5, 10, 3],
    }


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


def test_the_reference_computes_our_loss_and_trains():
    import_reference()
    from bert_packed.reports.mamba_reference import causal_arguments_of, causal_training

    batches = tiny_batches()[PADDED].batches
    arguments = causal_arguments_of(batches[0])
    lengths = (batches[0]["sequence_ids"] > 0).sum(axis=1)
    assert arguments["input_ids"].shape == (2, lengths.max())
    assert ((arguments["labels"] != -100).sum(axis=1) == lengths).all()
    rows, train = causal_training(batches, CONFIG)
    assert len(rows.inputs) == len(batches) and 0 < rows.padding < tiny_batches()[PADDED].padding
    train(0)


def test_a_reference_with_another_loss_is_refused(monkeypatch):
    import_reference()
    from bert_packed.reports import mamba_reference

    loss = mamba_reference.TorchTraining.loss
    monkeypatch.setattr(mamba_reference.TorchTraining, "loss", lambda *of: 1.0003 * loss(*of))
    with pytest.raises(InputError, match="`reference` must compute our loss"):
        mamba_reference.causal_training(tiny_batches()[PADDED].batches, CONFIG)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_json(CONFIG)))
    return path


def test_flags_arrive_and_tables_are_written(monkeypatch, tmp_path, config_file, capsys):
    asked = {}

    def told(name, result):
        return lambda *of: asked.setdefault(name, of) and result

    speed = {"way": SINGLE, "s": 1.0, "real tokens/s": 10.0, "gain": 1.0}
    monkeypatch.setattr(
        mamba_speed, "measure_training", told("training", ([speed], [{"packed against": SINGLE}]))
    )
    monkeypatch.setattr(mamba_speed, "measure_operators", told("operators", [{"operator": "scan", **speed}]))
    monkeypatch.setattr(mamba_speed, "step_memory", told("memory", [{"tokens": 64}]))
    table, picture = tmp_path / "tables.json", tmp_path / "picture.png"
    flags = {"bert_config_file": config_file, "parts": ",".join(packmamba.PARTS), "max_seq_length": 128}
    flags |= {"pack_length": 256, "batch_size": 2, "num_steps": 2, "num_shapes": 3, "window": 1, "repeats": 7}
    flags |= {"memory_lengths": "64,128", "random_seed": 5, "json": table, "picture": picture}
    assert command(*(f"--{name}={value}" for name, value in flags.items()), "--reference") == 0
    config, batches, repeats, reference = asked["training"]
    assert (config, repeats, reference) == (CONFIG, 7, True)
    assert asked["operators"] == (CONFIG, batches, 7) and asked["memory"] == (CONFIG, [64, 128])
    assert [batch["token_ids"].shape for batch in batches[PACKED].batches] == [(2, 256)] * 2
    assert batches[PADDED].batches[0]["token_ids"].shape == (4, 128)
    assert len({batch["token_ids"].shape for batch in batches[SINGLE].batches}) == 3
    lengths = np.maximum(1, draw_lengths(packmamba.ALL_LENGTHS, 5) * 128 // 2048)
    tables = json.loads(table.read_text())
    assert tables["padding"] == padding_rates(lengths, 128, 256, window=1, seed=5)
    # a window of one sequence is the order of arrival
    assert tables["padding"][1]["rows"] == tables["padding"][2]["rows"]
    assert list(tables) == ["padding", "training", "packed against others", "operators", "memory"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "histogram-packed (cghp)" in capsys.readouterr().out


def test_lengths_of_records(tmp_path, config_file, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("a few words of text. " * number for number in range(1, 30)))
    from data_gen.text.create_config import CreateConfig
    from data_gen.text.create_job import create

    create(
        CreateConfig(
            input_file=str(text),
            output_dir=str(tmp_path / "records"),
            objective="causal_lm",
            max_seq_length=64,
            vocab_size=300,
            num_workers=1,
        )
    )
    records = f"--input_file={tmp_path}/records/train-*.tfrecord"
    flags = [f"--bert_config_file={config_file}", "--parts=padding", "--pack_length=128", records]
    assert command(*flags, "--max_seq_length=64", f"--json={tmp_path}/t.json") == 0
    manifest = json.loads((tmp_path / "records" / "manifest.json").read_text())
    rows = json.loads((tmp_path / "t.json").read_text())["padding"]
    assert rows[0]["rows"] == manifest["splits"]["train"]["num_sequences"] and rows[0]["tokens"] == 64
    assert (
        command(*flags[:3], f"{records}", "--max_seq_length=64", "--parts=training", "--batch_size=999") == 2
    )
    assert "must hold enough to fill 999 packs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, rule",
    [
        (["--parts=padding,speed"], "parts=padding,speed: must be of padding, training, operators, memory"),
        (["--pack_length=1024"], "`pack_length` must be at least max_seq_length=2048"),
        (["--memory_lengths=64,0"], "`memory_lengths` must be whole numbers from 1"),
        (["--reference", "--parts=padding"], "`reference` needs training among `parts`"),
        (["--bert_config_file=bert-tiny"], "`bert_config_file` must be a Mamba"),
    ],
)
def test_mistakes(flags, rule, capsys):
    assert command(*flags) == 2
    assert rule in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.both_backends
def test_a_measurement(tmp_path, config_file, capsys):
    """Nothing replaced: engines, programs and clock."""
    table = tmp_path / "tables.json"
    flags = [
        f"--bert_config_file={config_file}",
        f"--json={table}",
        "--max_seq_length=64",
        "--pack_length=64",
    ]
    assert (
        command(*flags, "--batch_size=2", "--num_shapes=1", "--repeats=1", "--parts=training,operators") == 0
    )
    tables = json.loads(table.read_text())
    assert [row["way"] for row in tables["training"]] == [*WAYS, NO_RESETS]
    assert [row["packed against"] for row in tables["packed against others"]] == [SINGLE, PADDED, NO_RESETS]
    assert len(tables["operators"]) == 6
