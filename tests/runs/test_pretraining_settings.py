"""Settings of `run_pretraining.py` in effect: runs up to the outer loop, which is handed over to the test.

Those of meshes are in `tests/commands/test_layout_runs.py`.
"""

import dataclasses
import itertools
import json

import next_tokens
import numpy as np
import pytest
import recorded_calls
from packs import VOCAB_SIZE, batch_of, random_packs, random_sequence, write_packs
from recorded_calls import SAVES, add_results, arguments, other_run, run
from tiny import CONFIG, MAX_SEQ_LENGTH, make_engine, manifest_of

from bert_packed import cli
from bert_packed.architectures.bert.model import count_flops
from bert_packed.architectures.registry import PRETRAINING, ablate, ablations, config_json
from bert_packed.checkpoints import checkpoint
from bert_packed.checkpoints.starting_weights import read_config
from bert_packed.objectives.features import BATCH_NAMES
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.runs import pretraining, run_summary, vocabulary
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.text import tokenization
from bert_packed.text.masking import MaskingRules
from bert_packed.training import loop
from bert_packed.training.optimization import build_optimizer
from data_gen import sample_data

FACTOR = 2.0  # packing factor of the changed run's data
WIDE = dataclasses.replace(CONFIG, hidden_size=32)
MOMENT, STEPS_BEFORE = 0.25, 8  # of the run whose optimizer's state is kept
COUNTS = {"num_tokens": 3.0, "num_pairs": 5.0, "num_predictions": 2.0, "num_sequences": 1.0}
CHANGED = recorded_calls.CHANGED | {"train_batch_size": 6, "eval_batch_size": 4, "num_train_steps": 50}
CHANGED |= {"num_warmup_steps": 7, "num_decay_steps": 9, "end_learning_rate": 0.002, "decay_power": 2.0}
CHANGED |= {"mlm_loss": "per_token", "packing_correction": "betas", "ablation": "no_next_sentence"}
CHANGED |= {"shuffle_buffer_size": 1, "eval_steps": 5, "max_eval_steps": 1, "profile_steps": "3,4"}
CHANGED |= {"export_every": 13, "sample_data": True, "keep_optimizer_state": True}
MASKED = {"masking": "dynamic", "do_whole_word_mask": True, "objective": "mlm"}
MASKED |= {"mask_replace_prob": 0.5, "random_replace_prob": 0.25}


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
    manifest = manifest_of(num_sequences=12 * FACTOR, num_packs=12)
    (folder / "b" / "manifest.json").write_text(json.dumps(manifest))
    narrow = dataclasses.replace(CONFIG, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    for name, config in (("narrow", narrow), ("wide", WIDE)):
        (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(config)))
    wordpieces = (*tokenization.SPECIAL_TOKENS, *(f"w{number}" for number in range(VOCAB_SIZE - 5)))
    tokenization.save_vocab(tokenization.Vocabulary(wordpieces), folder / "vocab.txt")
    (folder / "mamba.json").write_text(json.dumps(config_json(next_tokens.CONFIG)))
    (folder / "next").mkdir()
    next_tokens.write_packs(folder / "next" / "packed.tfrecord", next_tokens.packed_and_unpacked()[0])
    ablated = ablate(WIDE, CHANGED["ablation"])
    optimizer = build_optimizer(PretrainingConfig(input_file="x", output_dir="y"))
    earlier = make_engine(config=ablated, seed=7, optimizer=optimizer)
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
    """Replace the outer loop: evaluate, save, export and prune, without a step."""
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
            (run_summary, "measured_flops_per_second"): lambda dtype: 1e9,
        },
        output_dir=folder,
        **flags,
    )
    return add_results(seen, folder)


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


def run_masked(folder, files, **sizes):
    return run_to_loop(folder, **given(files[0], **MASKED, vocab_file=files[0] / "vocab.txt", **sizes))


@pytest.fixture(scope="module")
def masked(files, tmp_path_factory):
    return run_masked(tmp_path_factory.mktemp("masked"), files)


@pytest.fixture(scope="module")
def grown(files, tmp_path_factory):
    sizes = {"train_batch_size": 6, "initial_batch_size": 2, "batch_warmup_steps": 4, "micro_batch_size": 2}
    return run_masked(tmp_path_factory.mktemp("grown"), files, **sizes)


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


def kept(seen):
    """Moments of the start that are left."""
    optimizer = seen.engine.optimizer
    moments = [variable.numpy() for place in (0, 3) for variable in optimizer.moments_of(place)]
    return int(optimizer.iterations), {float(value) for values in moments for value in values.ravel()}


def first_tokens(contender):
    return tuple(contender.batches[0]["token_ids"].tolist()[0])


def config_of(seen):
    return seen.engine.model.bert.config


def ids_of(batch):
    return {*map(tuple, batch["token_ids"].tolist())}


# Each other setting of `changed` is seen at this place, with this value
SEEN = recorded_calls.SEEN | {
    "beta_1": (lambda seen: seen.engine.optimizer.beta_1, pytest.approx(0.8**FACTOR)),
    "beta_2": (lambda seen: seen.engine.optimizer.beta_2, pytest.approx(0.95**FACTOR)),
    "dtype of the peak": (lambda seen: arguments(seen, "measured_flops_per_second", "dtype"), ["bfloat16"]),
    "keep_optimizer_state": (kept, (STEPS_BEFORE, {MOMENT})),
    "keep_optimizer_state, for people": (lambda seen: "moments, of 8 steps, are kept" in seen.out, True),
    "mlm_loss": (divided_by, ["num_predictions"]),
    "ablation": (lambda seen: config_of(seen).ablation_no_next_sentence, True),
    "ablation of a checkpoint": (lambda seen: ablations(read_config(seen.folder)), ["no_next_sentence"]),
    "ablation, for people": (lambda seen: "ABLATION   no_next_sentence: PACKING IS BROKEN" in seen.out, True),
    "train_batch_size": (lambda seen: len(seen.batch["token_ids"]), 6),
    "eval_batch_size": (lambda seen: [len(batch) for batch in seen.engine.evaluated], [4]),
    "eval_steps": (lambda seen: seen.config.eval_steps, 5),
    "num_train_steps": (lambda seen: seen.config.num_train_steps, 50),
    "export_every": (lambda seen: seen.config.export_every, 13),
    "export_vocab_file": (lambda seen: (seen.folder / f"export-{SAVES}" / "vocab.txt").exists(), True),
    "profile_steps": (lambda seen: [call["steps"] for call in seen.calls["Profile"]], [range(3, 5)]),
    "sample_data": (lambda seen: "build_missing" in seen.calls, True),
    "json": (
        lambda seen: json.loads((seen.folder.parent / "report.json").read_text())["speed"],
        [{"data": "unpacked"}, {"data": "packed"}],
    ),
}


# These settings have their place in any run
IN_ANY_RUN = [
    *("epsilon", "weight_decay", "max_grad_norm", "bert_config_file", "remat", "dtype", "mlm_loss"),
    *("ablation", "hidden_dropout_prob", "attention_probs_dropout_prob", "train_batch_size"),
    "micro_batch_size",
]


@pytest.mark.parametrize("name", SEEN)
def test_a_setting_has_its_effect(changed, default, name):
    found, value = SEEN[name]
    assert found(changed) == value
    if name in IN_ANY_RUN:
        assert found(default) != value


def test_the_rates_of_the_log_and_of_the_optimizer(changed):
    """7 steps up, 9 steps of quadratic decay before the last of 50; the optimizer had 8 steps before."""
    for step in range(0, 50, 3):
        left = min((50 - step) / 9, 1)
        rate = 0.03 * (step + 1) / 7 if step < 7 else 0.002 + (0.03 - 0.002) * left**2
        assert changed.hooks.learning_rate(step) == pytest.approx(rate, rel=1e-5)
        changed.engine.optimizer.iterations.assign(STEPS_BEFORE + step)
        assert float(changed.engine.optimizer.learning_rate) == pytest.approx(rate, rel=1e-5)
    changed.engine.optimizer.iterations.assign(STEPS_BEFORE)


def test_weights_that_decay_and_that_start(changed, files):
    for variable in changed.engine.model.trainable_variables:
        is_plain = "LayerNorm" in variable.path or "bias" in variable.path.split("/")[-1]
        assert variable.is_decayed == (not is_plain)
    stored = checkpoint.read_weights(files[0] / "start" / "checkpoint-3")
    assert all(np.array_equal(changed.weights[name], values) for name, values in stored.items())


def test_the_files_of_each_batch(changed, default, files):
    ids = {name: {tuple(row) for row in rows} for name, rows in files[1].items()}
    assert changed.batch["token_ids"].tolist() == files[1]["b"][:6]  # not shuffled
    assert ids_of(default.batch) < ids["a"]
    assert default.batch["token_ids"].tolist() != files[1]["a"][:3]
    assert {*map(tuple, changed.engine.evaluated[0].tolist())} < ids["c"]
    unpacked, packed = arguments(changed, "compare", "contenders")[0]
    assert first_tokens(unpacked) in ids["unpacked"] and first_tokens(packed) in ids["b"]
    assert changed.hooks.scale.model_flops(COUNTS) == count_flops(PRETRAINING, WIDE, COUNTS)
    assert changed.hooks.scale.positions_per_step == 6 * MAX_SEQ_LENGTH


def test_the_seed_is_of_weights_dropout_and_order(default, files, tmp_path):
    """The optimizer and the devices are as they are chosen."""
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


def test_other_files_and_flags(files, tmp_path):
    """The counts of next tokens; attention; an earlier run, which is kept unless it is overwritten."""
    flags = given(files[0], input_file=files[0] / "next" / "*", bert_config_file=files[0] / "mamba.json")
    for more, count in (({}, "num_predictions"), ({"lm_loss": "per_sequence"}, "num_sequences")):
        seen = run_to_loop(tmp_path / count, **flags, objective="causal_lm", **more)
        assert divided_by(seen, "lm_loss", "label_sequences") == [count]
    seen = run_to_loop(tmp_path / "run", **given(files[0]), attention="flash")
    assert seen.status == 2 and "`attention`" in seen.error
    seen = run_to_loop(other_run(tmp_path / "kept"), **given(files[0]))
    assert seen.status == 2 and (seen.folder / "checkpoint-77").exists()


def test_dynamic_masking(masked, default, files):
    (call,) = masked.calls["DynamicMasking"]
    assert call["rules"] == MaskingRules(True, 0.5, 0.25) and call["seed"] == PretrainingConfig.random_seed
    assert len(call["vocabulary"]) == VOCAB_SIZE
    assert not all(row in files[1]["a"] for row in masked.batch["token_ids"].tolist())
    # The model is for masked tokens alone
    assert masked.engine.model.head == "masked_lm" and "nsp_labels" not in masked.batch
    config, flops = masked.engine.model.config, masked.hooks.scale.model_flops(COUNTS)
    with_both, width = count_flops(PRETRAINING, config, COUNTS), config.hidden_size
    assert with_both - flops == 6 * (width**2 + 2 * width)


def test_a_run_that_continues_draws_the_same_masks(masked, grown):
    for seen in (masked, grown):
        batches = seen.hooks.batches
        whole, rest = list(itertools.islice(batches(0), 8)), list(itertools.islice(batches(5), 3))
        for one, other in zip(whole[5:], rest, strict=True):
            np.testing.assert_array_equal(one["token_ids"], other["token_ids"])


def test_a_batch_that_grows_has_the_same_masks(masked, grown):
    """The same packs in the same order, whatever steps they are in."""
    steps = [
        [[row for row in batch["token_ids"].tolist() if any(row)] for batch in itertools.islice(batches, num)]
        for batches, num in ((grown.hooks.batches(0), 6), (masked.hooks.batches(0), 8))
    ]
    assert [len(rows) for rows in steps[0]] == [2, 2, 4, 4, 6, 6]
    assert list(itertools.chain(*steps[0])) == list(itertools.chain(*steps[1]))
    assert grown.engine.objective.skips_empty and not masked.engine.objective.skips_empty
