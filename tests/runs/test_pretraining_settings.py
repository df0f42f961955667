"""Settings of `run_pretraining.py` in effect: runs up to the outer loop, which is handed over to the test.

Those of meshes are in `tests/commands/test_layout_runs.py`.
"""

import dataclasses
import itertools
import json

import next_tokens
import numpy as np
import pytest
from packs import VOCAB_SIZE, batch_of, random_packs, random_sequence, write_packs
from recorded_calls import arguments, other_run, run
from tiny import CONFIG, MAX_SEQ_LENGTH, make_engine

from bert_packed import cli
from bert_packed.architectures.bert.model import count_flops
from bert_packed.architectures.registry import PRETRAINING, ablate, config_json
from bert_packed.checkpoints import checkpoint
from bert_packed.objectives.features import BATCH_NAMES
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.runs import compile_only, pretraining, vocabulary
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.text import tokenization
from bert_packed.text.masking import MaskingRules
from bert_packed.training import loop
from bert_packed.training.optimization import build_optimizer
from bert_packed.training.step_report import StepProgram
from data_gen import sample_data

FACTOR = 2.0  # packing factor of the changed run's data
WIDE = dataclasses.replace(CONFIG, hidden_size=32)
SAVES = 5
MOMENT, STEPS_BEFORE = 0.25, 8  # of the run whose optimizer's state is kept
COUNTS = {"num_tokens": 3.0, "num_pairs": 5.0, "num_predictions": 2.0, "num_sequences": 1.0}
EMPTY_PROGRAM = StepProgram("HloModule step\n\nENTRY main {\n  ROOT x = f32[] parameter(0)\n}", 1.0, 2)
CHANGED = {
    "train_batch_size": 6,
    "micro_batch_size": 2,
    "eval_batch_size": 4,
    "num_train_steps": 50,
    "num_warmup_steps": 7,
    "num_decay_steps": 9,
    "learning_rate": 0.03,
    "end_learning_rate": 0.002,
    "decay_power": 2.0,
    "weight_decay": 0.05,
    "beta_1": 0.8,
    "beta_2": 0.95,
    "epsilon": 1e-3,
    "max_grad_norm": 0.5,
    "mlm_loss": "per_token",
    "packing_correction": "betas",
    "ablation": "no_next_sentence",
    "dtype": "mixed_bfloat16",
    "remat": True,
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.3,
    "shuffle_buffer_size": 1,
    "max_skipped_steps": 7,
    "log_steps": 3,
    "eval_steps": 5,
    "max_eval_steps": 1,
    "save_checkpoints_steps": 11,
    "profile_steps": "3,4",
    "keep_checkpoint_max": 2,
    "export_every": 13,
    "sample_data": True,
    "overwrite": True,
    "keep_optimizer_state": True,
}  # and files, in `changed`
MASKED = {
    "masking": "dynamic",
    "do_whole_word_mask": True,
    "mask_replace_prob": 0.5,
    "random_replace_prob": 0.25,
    "objective": "mlm",
}


def write(path, packs, **shape):
    path.parent.mkdir(exist_ok=True)
    write_packs(path, packs, MAX_SEQ_LENGTH, **shape)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Records and models for the runs: the folder, and the token ids of each file's packs by name."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    packs = {  # with more predictions than sequences
        name: [[random_sequence(rng, 6, 2), *pack[1:]] for pack in random_packs(rng, size, MAX_SEQ_LENGTH)]
        for name, size in (("a", 9), ("b", 12), ("c", 6))
    }
    for name in packs:
        write(folder / name / "packed.tfrecord", packs[name])
    single = batch_of([[s] for pack in packs["b"] for s in pack], MAX_SEQ_LENGTH, 1, 8)
    features = {name: single[ours] for name, ours in BATCH_NAMES.items()}
    tfrecords.write_records(folder / "unpacked.tfrecord", serialize_examples(features))
    manifest = {"kind": "packed", "files": [], "num_sequences": 12 * FACTOR, "num_packs": 12}
    (folder / "b" / "manifest.json").write_text(json.dumps({**manifest, "histogram": {"lengths": [6]}}))
    narrow = dataclasses.replace(CONFIG, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    for name, config in (("narrow", narrow), ("wide", WIDE)):
        (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(config)))
    wordpieces = (*tokenization.SPECIAL_TOKENS, *(f"w{number}" for number in range(VOCAB_SIZE - 5)))
    tokenization.save_vocab(tokenization.Vocabulary(wordpieces), folder / "vocab.txt")
    (folder / "mamba.json").write_text(json.dumps(config_json(next_tokens.CONFIG)))
    (folder / "next").mkdir()
    next_tokens.write_packs(folder / "next" / "packed.tfrecord", next_tokens.packed_and_unpacked()[0])
    ablated = ablate(WIDE, CHANGED["ablation"])
    earlier = make_engine(
        config=ablated, seed=7, optimizer=build_optimizer(PretrainingConfig(input_file="x", output_dir="y"))
    )
    for variable in earlier.optimizer.variables:
        variable.assign(np.full(variable.shape, MOMENT).astype(variable.dtype))
    earlier.optimizer.iterations.assign(STEPS_BEFORE)
    checkpoint.save_checkpoint(folder / "start", 3, earlier, ablated, {})
    rows = {name: batch_of(packs[name], MAX_SEQ_LENGTH, 4, 12)["token_ids"].tolist() for name in packs}
    return folder, {**rows, "unpacked": single["token_ids"].tolist()}


def given(folder, **flags):
    flags = {"input_file": folder / "a" / "*", "bert_config_file": folder / "narrow.json", **flags}
    return {"train_batch_size": 3, "num_train_steps": 20, **flags}


def train(engine, config, hooks, first_step=0, state=None):
    """In the place of the outer loop: evaluate, save, export and prune, without a step."""
    engine.evaluated = []

    def eval_step(batch):
        engine.evaluated.append(batch["token_ids"])
        return dict.fromkeys(engine.objective.sum_names, 1.0)

    engine.eval_step = eval_step
    if hooks.evaluate:
        hooks.evaluate(SAVES)
    for step in range(SAVES):
        hooks.save(step, {"interval": {}, "evaluation_due": False})
    if hooks.export:
        hooks.export(SAVES)
    hooks.prune()


def run_to_loop(folder, **flags):
    seen = run(
        cli.pretrain,
        PretrainingConfig,
        [(pretraining, "make_engine"), (pretraining, "Profile"), (vocabulary, "DynamicMasking")],
        {
            (loop, "train"): train,
            (sample_data, "build_missing"): lambda: None,
            (pretraining, "compare"): lambda contenders, _: [{"data": one.name} for one in contenders],
            (pretraining, "measured_flops_per_second"): lambda dtype: 1e9,
            (compile_only, "compile_step"): lambda *_: [EMPTY_PROGRAM],
            (compile_only, "make_virtual_devices"): lambda number: None,
        },
        output_dir=folder,
        **flags,
    )
    seen.folder = folder
    for name in ("engine", "config", "hooks"):
        setattr(seen, name, (arguments(seen, "train", name) or [None])[0])
    if seen.engine:
        seen.weights = {name: variable.numpy() for name, variable in seen.engine.weights().items()}
        seen.batch = next(seen.hooks.batches(0))
    return seen


@pytest.fixture(scope="module")
def default(files, tmp_path_factory):
    return run_to_loop(tmp_path_factory.mktemp("default"), **given(files[0]))


@pytest.fixture(scope="module")
def changed(files, tmp_path_factory):
    folder, tmp = files[0], tmp_path_factory.mktemp("changed")
    seen = run_to_loop(
        other_run(tmp / "run"),
        **CHANGED,
        input_file=folder / "b" / "*.tfrecord",
        eval_input_file=folder / "c" / "*",
        bert_config_file=folder / "wide.json",
        init_checkpoint=folder / "start",
        unpacked_input_file=folder / "unpacked.tfrecord",
        export_vocab_file=folder / "vocab.txt",
        json=tmp / "report.json",
    )
    assert seen.status == 0, seen.error
    return seen


@pytest.fixture(scope="module")
def masked(files, tmp_path_factory):
    flags = {**given(files[0]), **MASKED, "vocab_file": files[0] / "vocab.txt"}
    return run_to_loop(tmp_path_factory.mktemp("masked"), **flags)


@pytest.fixture(scope="module")
def grown(files, tmp_path_factory):
    sizes = {"train_batch_size": 6, "initial_batch_size": 2, "batch_warmup_steps": 4, "micro_batch_size": 2}
    flags = {**given(files[0]), **MASKED, "vocab_file": files[0] / "vocab.txt", **sizes}
    return run_to_loop(tmp_path_factory.mktemp("grown"), **flags)


def block(seen):
    return seen.engine.model.bert.blocks[0]


def divided_by(seen, loss="mlm_loss", predicted="prediction_sequences"):
    """Names of the counts that a loss is divided by, in the step and in the log."""
    predictions, sequences = np.count_nonzero(seen.batch[predicted]), seen.batch["slot_weights"]
    counts = {"num_predictions": predictions, "num_sequences": sequences.sum()}
    assert predictions != sequences.sum()
    objective = seen.engine.objective
    in_step = float(objective.denominators(objective.counts(seen.batch))[loss])
    sums = {name: float(number) for number, name in enumerate(objective.sum_names, 2)}
    in_log = sums[loss] / seen.hooks.means(sums)[loss]
    return [name for name in counts if counts[name] == in_step and sums[name] == pytest.approx(in_log)]


def test_the_optimizer(changed):
    optimizer = changed.engine.optimizer
    assert (optimizer.beta_1, optimizer.beta_2) == pytest.approx((0.8**FACTOR, 0.95**FACTOR))
    assert (optimizer.epsilon, optimizer.weight_decay_rate) == (1e-3, 0.05)
    assert changed.engine.max_grad_norm == 0.5
    for variable in changed.engine.model.trainable_variables:
        is_plain = "LayerNorm" in variable.path or "bias" in variable.path.split("/")[-1]
        assert variable.is_decayed == (not is_plain)


def test_the_learning_rate_of_the_log_and_of_the_optimizer(changed):
    """7 steps up, 9 steps of quadratic decay before the last of 50; the optimizer had 8 steps before."""
    for step in range(0, 50, 3):
        left = min((50 - step) / 9, 1)
        rate = 0.03 * (step + 1) / 7 if step < 7 else 0.002 + (0.03 - 0.002) * left**2
        assert changed.hooks.learning_rate(step) == pytest.approx(rate, rel=1e-5)
        changed.engine.optimizer.iterations.assign(STEPS_BEFORE + step)
        assert float(changed.engine.optimizer.learning_rate) == pytest.approx(rate, rel=1e-5)
    changed.engine.optimizer.iterations.assign(STEPS_BEFORE)


def test_the_model_and_where_it_starts(changed, files):
    bert, stored = changed.engine.model.bert, checkpoint.read_weights(files[0] / "start" / "checkpoint-3")
    assert bert.config.hidden_size == 32 and bert.remat
    assert block(changed).attention.query.compute_dtype == "bfloat16"
    assert {block(changed).attention.dropout.rate, block(changed).feed_forward.dropout.rate} == {0.2}
    assert block(changed).attention.attention_dropout.rate == 0.3
    assert all(np.array_equal(changed.weights[name], values) for name, values in stored.items())
    optimizer = changed.engine.optimizer
    assert int(optimizer.iterations) == STEPS_BEFORE
    kept = [variable.numpy() for place in (0, 3) for variable in optimizer.moments_of(place)]
    assert {float(value) for values in kept for value in values.ravel()} == {MOMENT}


def test_losses(changed, default):
    assert (divided_by(changed), divided_by(default)) == (["num_predictions"], ["num_sequences"])
    losses = [
        float(seen.engine.objective.sums(seen.engine.model(seen.batch), seen.batch)["nsp_loss"])
        for seen in (changed, default)
    ]
    assert losses[0] == 0 < losses[1] and changed.engine.model.config.ablation_no_next_sentence


def test_batches(changed, default, files):
    ids = {name: {tuple(row) for row in rows} for name, rows in files[1].items()}
    assert changed.batch["token_ids"].tolist() == files[1]["b"][:6]  # not shuffled
    assert {*map(tuple, default.batch["token_ids"].tolist())} < ids["a"]
    assert default.batch["token_ids"].tolist() != files[1]["a"][:3]
    assert arguments(changed, "make_engine", "arguments")[0][3] == 2
    assert arguments(default, "make_engine", "arguments")[0][3] == 3
    (evaluated,) = changed.engine.evaluated  # one batch, though there are two
    assert len(evaluated) == 4 and {*map(tuple, evaluated.tolist())} < ids["c"]
    assert changed.hooks.scale.positions_per_step == 6 * MAX_SEQ_LENGTH
    unpacked, packed = arguments(changed, "compare", "contenders")[0]
    for contender, name, other in ((unpacked, "unpacked", "b"), (packed, "b", "unpacked")):
        first = tuple(contender.batches[0]["token_ids"].tolist()[0])
        assert first in ids[name] and first not in ids[other]


def test_the_loop_and_what_it_writes(changed):
    steps = {name: getattr(changed.config, name) for name in CHANGED if name.endswith("_steps")}
    assert steps == {name: CHANGED[name] for name in steps}  # what `loop.train` reads
    assert changed.config.export_every == 13
    assert len(list(changed.folder.glob("*.csv"))) == 2
    kept = {path.name for path in changed.folder.glob("checkpoint-*")}
    assert kept == {f"checkpoint-{step}" for step in (SAVES - 2, SAVES - 1)}  # none of the earlier run
    assert (changed.folder / f"export-{SAVES}" / "vocab.txt").exists()
    (profile,) = changed.calls["Profile"]
    assert profile["steps"] == range(3, 5)
    assert profile["folder"] == changed.folder / "tensorboard" / "profile"
    report = json.loads((changed.folder.parent / "report.json").read_text())
    assert report["speed"] == [{"data": "unpacked"}, {"data": "packed"}]
    assert "build_missing" in changed.calls


def test_the_peak_is_measured_in_the_dtype_of_the_run(changed, default):
    name = "measured_flops_per_second"
    assert [arguments(seen, name, "dtype") for seen in (default, changed)] == [["float32"], ["bfloat16"]]
    assert default.hooks.scale.peak_flops == 1e9
    assert changed.hooks.scale.model_flops(COUNTS) == count_flops(PRETRAINING, WIDE, COUNTS)


def test_an_earlier_run_is_kept_unless_it_is_overwritten(files, tmp_path):
    kept = run_to_loop(other_run(tmp_path / "kept"), **given(files[0]))
    assert kept.status == 2 and (kept.folder / "checkpoint-77").exists()


def test_the_seed_is_of_weights_dropout_and_order(default, files, tmp_path):
    """And the optimizer and the devices are as they are chosen."""
    flags = {"random_seed": 99, "optimizer": "adam", "distribution": "mirrored"}
    other = run_to_loop(tmp_path / "run", **given(files[0]), **flags)
    kernel = "bert/layer_0/attention/query/kernel"
    assert not np.array_equal(default.weights[kernel], other.weights[kernel])
    seeds = [
        {name: v.numpy().tolist() for name, v in seen.engine.training_state().items() if "seed" in name}
        for seen in (default, other)
    ]
    assert seeds[0].keys() == seeds[1].keys() and all(seeds[0][name] != seeds[1][name] for name in seeds[0])
    assert default.batch["token_ids"].tolist() != other.batch["token_ids"].tolist()
    assert [type(seen.engine.optimizer).__name__ for seen in (default, other)] == ["Lamb", "AdamWeightDecay"]
    assert default.engine.replicas is None and other.engine.replicas is not None


def test_stable_adamw_and_a_decay_by_the_square_root(files, tmp_path):
    flags = {"optimizer": "stable_adamw", "decay_type": "1-sqrt", "num_warmup_steps": 4, "num_decay_steps": 8}
    seen = run_to_loop(tmp_path / "run", **given(files[0]), **flags)
    optimizer = seen.engine.optimizer
    assert (type(optimizer).__name__, seen.engine.max_grad_norm) == ("StableAdamW", 1.0)
    for step, share in {0: 0.25, 3: 1, 11: 1, 12: 1, 14: 0.5, 20: 0}.items():
        optimizer.iterations.assign(step)
        rates = [seen.hooks.learning_rate(step), float(optimizer.learning_rate)]
        assert rates == pytest.approx([1e-3 * share] * 2, rel=1e-5)


def test_attention(files, tmp_path):
    seen = run_to_loop(tmp_path / "run", **given(files[0]), attention="flash")
    assert seen.status == 2 and "`attention`" in seen.error


def test_next_tokens(files, tmp_path):
    flags = given(files[0], input_file=files[0] / "next" / "*", bert_config_file=files[0] / "mamba.json")
    for number, (more, count) in enumerate(
        (({}, "num_predictions"), ({"lm_loss": "per_sequence"}, "num_sequences"))
    ):
        seen = run_to_loop(tmp_path / f"{number}", **flags, objective="causal_lm", **more)
        assert divided_by(seen, "lm_loss", "label_sequences") == [count]


def test_a_step_is_compiled_only(files, tmp_path):
    flags = {"compile_only": tmp_path / "program", "num_virtual_devices": 2}
    seen = run_to_loop(tmp_path / "run", **given(files[0]), **flags)
    assert not seen.folder.exists() and (tmp_path / "program" / "step.json").exists()
    assert [list(call.values()) for call in seen.calls["make_virtual_devices"]] == [[2]]


def test_dynamic_masking(masked, default, files):
    (call,) = masked.calls["DynamicMasking"]
    assert call["rules"] == MaskingRules(True, 0.5, 0.25) and call["seed"] == PretrainingConfig.random_seed
    assert len(call["vocabulary"]) == VOCAB_SIZE
    assert masked.batch["token_ids"].tolist() != default.batch["token_ids"].tolist()
    rows = files[1]["a"]
    assert not all(row in rows for row in masked.batch["token_ids"].tolist())


def test_masked_tokens_alone_are_learnt_by_a_model_for_them(masked):
    assert masked.engine.model.head == "masked_lm" and "nsp_labels" not in masked.batch
    config, flops = masked.engine.model.config, masked.hooks.scale.model_flops(COUNTS)
    with_both, width = count_flops(PRETRAINING, config, COUNTS), config.hidden_size
    assert with_both - flops == 6 * (width**2 + 2 * width)


def test_a_run_that_continues_has_the_masks_of_one_that_never_stopped(masked, grown):
    for seen in (masked, grown):
        batches = seen.hooks.batches
        whole, rest = list(itertools.islice(batches(0), 8)), list(itertools.islice(batches(5), 3))
        for one, other in zip(whole[5:], rest, strict=True):
            np.testing.assert_array_equal(one["token_ids"], other["token_ids"])


def test_a_batch_that_grows_has_the_masks_of_one_that_does_not(masked, grown):
    """The same packs in the same order, whatever steps they are in."""
    steps = [
        [[row for row in batch["token_ids"].tolist() if any(row)] for batch in itertools.islice(batches, num)]
        for batches, num in ((grown.hooks.batches(0), 6), (masked.hooks.batches(0), 8))
    ]
    assert [len(rows) for rows in steps[0]] == [2, 2, 4, 4, 6, 6]
    assert list(itertools.chain(*steps[0])) == list(itertools.chain(*steps[1]))
    assert grown.engine.objective.skips_empty and not masked.engine.objective.skips_empty


def test_a_norm_of_0_clips_nothing():
    config = PretrainingConfig(input_file="x", output_dir="y", max_grad_norm=0.0)
    assert build_optimizer(config).global_clipnorm is None
