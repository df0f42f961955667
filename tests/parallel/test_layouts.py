"""A packed BERT spread over a mesh trains as on one device: losses, norms, gradients, weights, dropout."""

import dataclasses
import functools

import numpy as np
import pytest
from layouts import CLIP, WIDE, WITH_DROPOUT, batch_at, make_devices, make_engine, needs_jax, train, values_of
from tiny import Trained, to_floats

from bert_packed.layers import context as layers
from bert_packed.layers.cpu_gradients import has_gradients_for_cpus
from bert_packed.layers.dropout import is_kept
from bert_packed.objectives.pretraining import masked_lm_objective
from bert_packed.training.optimization import StableAdamW
from bert_packed.training.program_text import find_collectives, read_module

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
jnp = jax.numpy
pytestmark = needs_jax
NUM_STEPS = 6
CASES = [
    ("optimus2d", (1, 2, 2), "gather"),
    ("optimus2d", (1, 4, 4), "gather"),
    ("optimus2d", (2, 2, 2), "tree"),
    ("megatron1d", (1, 2, 2), "gather"),
    ("megatron1d", (1, 4, 4), "gather"),
    ("megatron1d", (2, 1, 2), "gather"),
]
SLOW = CASES[4]
each_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case == SLOW else case for case in CASES],
    ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}",
)


@pytest.fixture(scope="module")
def trained():
    make_devices()

    @functools.cache
    def run(case):
        engine = make_engine(*case[:2], transport=case[2])
        figures = train(engine, [0])
        moments = values_of(engine.training_state())
        figures += train(engine, range(1, NUM_STEPS))
        evaluated = to_floats(engine.eval_step(batch_at(9)))
        return Trained(
            engine,
            figures,
            moments,
            values_of(engine.weights()),
            values_of(engine.training_state()),
            evaluated,
        )

    return run


ONE_DEVICE = ("none", None, "gather")


def assert_same(one, many):
    """Of two `Trained`; the moments after a step from zeros are its gradient, clipped, and its square."""
    for want, found in zip([*one.figures, one.evaluated], [*many.figures, many.evaluated], strict=True):
        assert {name: found[name] for name in want} == pytest.approx(want, rel=1e-6)
    assert one.moments.keys() == many.moments.keys()
    for name, want in one.moments.items():
        found = many.moments[name]
        assert found.shape == want.shape
        if "momentum" in name and "key_bias" not in name:
            assert np.abs(found - want).max() <= 1e-6 * np.abs(want).max(), name
    assert one.weights.keys() == many.weights.keys()
    for name, want in one.weights.items():
        if not name.endswith("key/bias"):  # whose gradient is 0 but for rounding
            np.testing.assert_allclose(many.weights[name], want, atol=1e-5, rtol=0, err_msg=name)
    for name, want in one.state.items():
        if "seed" in name:
            np.testing.assert_array_equal(many.state[name], want)


@each_case
def test_six_steps_are_those_of_one_device(trained, case):
    one, many = trained(ONE_DEVICE), trained(case)
    assert all(figures["gradient_norm"] > 2 * CLIP for figures in one.figures)  # the clip is active
    assert_same(one, many)


@each_case
def test_a_run_compiles_once(trained, case):
    engine = trained(case).engine
    assert engine.num_train_traces == 1
    assert engine.compiled_train_step._cache_size() == 1


def test_rows_hold_different_numbers_of_predictions():
    """Or a loss divided by the count of its row would pass for right."""
    used = (batch_at(0)["prediction_sequences"] > 0).sum(axis=1)
    for rows in (2, 4):
        # Each row's packs of both micro-batches
        by_row = used.reshape(2, rows, -1).sum(axis=(0, 2))
        assert len(set(by_row.tolist())) == rows, by_row


def device_shares(engine):
    """From weight to the part of it that one device holds, by the shardings of the compiled program."""
    compiled = engine.compiled_train_step.lower(*engine.step_arguments(batch_at(0))).compile()
    (arguments, _) = compiled.input_shardings
    outputs = compiled.output_shardings[0]
    shares = {}
    for kind in ("trainable", "optimizer"):
        variables = engine.model.trainable_variables if kind == "trainable" else engine.optimizer.variables
        for variable, given, made in zip(variables, arguments[0][kind], outputs[kind], strict=True):
            shape = variable.shape
            assert given.is_equivalent_to(made, len(shape)), variable.path  # or the next step would differ
            shares[variable.path] = np.prod(given.shard_shape(shape)) / max(np.prod(shape), 1)
    return shares


def is_vector(path):
    return path.endswith(("bias", "gamma", "beta")) or any(
        f"{kind}_{moment}" in path
        for kind in ("bias", "gamma", "beta")
        for moment in ("momentum", "velocity")
    )


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_each_device_holds_its_part_of_every_matrix(trained, case):
    side = case[1][1]
    for path, share in device_shares(trained(case).engine).items():
        if path.endswith(("iteration", "learning_rate")):
            continue
        assert share == (1 / side if is_vector(path) else 1 / side**2), path


def test_megatron_splits_the_matrices_of_blocks_and_the_vocabulary(trained):
    whole, split = set(), set()
    for path, share in device_shares(trained(CASES[3]).engine).items():
        assert share in (1, 1 / 4), path
        if path.startswith("pretraining/"):
            name = path.removeprefix("pretraining/bert/").removeprefix("pretraining/")
            (split if share < 1 else whole).add(name.replace("layer_1", "layer_0"))
    first = [f"layer_0/attention/{name}" for name in ("query", "key", "value")]
    first.append("layer_0/feed_forward/intermediate")
    second = ["layer_0/attention/output", "layer_0/feed_forward/output"]
    assert split == {
        "embeddings/word_embeddings",
        "predictions/output_bias",
        *(f"{name}/kernel" for name in first + second),
        *(f"{name}/bias" for name in first),
    }
    assert {f"{name}/bias" for name in second} <= whole


@each_case
def test_logits_of_the_vocabulary_are_nowhere_whole(trained, case):
    """31 tokens are 32 with what is added; of a micro-batch's 8 x 12 predictions a row has its part."""
    (program,) = trained(case).engine.step_programs(batch_at(0))
    module = read_module(program.text)
    layout, (copies, rows, columns), _ = case
    predictions = 8 // copies // (rows if layout == "optimus2d" else 1) * 12
    parts = columns if layout == "optimus2d" else rows * columns
    sizes = [shape.sizes for instruction in module.instructions for shape in instruction.shapes]
    padded = -(-31 // parts) * parts
    own = [one for one in sizes if one and one[-1] == padded // parts and np.prod(one[:-1]) == predictions]
    assert own  # each device has its part of the logits
    assert not [one for one in sizes if np.prod(one) >= predictions * 31 and one[-1] in (31, padded)]


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_gradients_are_in_blocks_between_micro_batches(trained, case):
    (program,) = trained(case).engine.step_programs(batch_at(0))
    sizes = {
        shape.sizes
        for instruction in read_module(program.text).instructions
        for shape in instruction.shapes
        if instruction.opcode == "while"
    }
    side = case[1][1]
    assert (48 // side, 96 // side) in sizes
    assert not {(48, 96), (96, 48), (48, 48)} & sizes


def norm_of_rows(clip, gradients, sums, max_grad_norm):
    """As if a vector that each of 2 rows has were counted in each."""
    vectors = [gradient for gradient in gradients if gradient.ndim == 1]
    return clip([*gradients, *vectors], sums, max_grad_norm)


def test_a_vector_counted_in_every_row_would_be_seen(trained, monkeypatch):
    from bert_packed.training.engines import jax as engine_module

    def counted_twice(gradients, sums, max_grad_norm):
        clipped, figures = norm_of_rows(clip, gradients, sums, max_grad_norm)
        return clipped[: len(gradients)], figures

    clip = engine_module.clip
    monkeypatch.setattr(engine_module, "clip", counted_twice)
    figures = train(make_engine(*CASES[0][:2]), [0])
    want = trained(ONE_DEVICE).figures[0]["gradient_norm"]
    assert figures[0]["gradient_norm"] != pytest.approx(want, rel=1e-4)


def test_a_collective_left_out_would_be_seen(trained, monkeypatch):
    from bert_packed.parallel import summa

    def own_part_alone(self, a_TX, b_TY):
        row = jax.lax.all_gather(a_TX, summa.COLUMN, axis=1, tiled=True)
        return (row.T @ b_TY)[: a_TX.shape[1]]

    monkeypatch.setattr(summa.Gather, "atb", own_part_alone)
    figures = train(make_engine(*CASES[0][:2]), [0])
    want = trained(ONE_DEVICE).figures[0]["gradient_norm"]
    assert figures[0]["gradient_norm"] != pytest.approx(want, rel=1e-4)


def test_a_loss_divided_by_the_count_of_a_row_would_be_seen(trained, monkeypatch):
    engine = make_engine(*CASES[0][:2])
    counts = engine.objective.counts

    def of_first_row(batch):
        return counts({name: values[: len(values) // 2] for name, values in batch.items()})

    monkeypatch.setattr(engine, "objective", dataclasses.replace(engine.objective, counts=of_first_row))
    want = trained(ONE_DEVICE).figures[0]["gradient_norm"]
    assert train(engine, [0])[0]["gradient_norm"] != pytest.approx(want, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[2], CASES[3]], ids=str)
def test_masked_tokens_alone_in_a_batch_that_grows(trained, case):
    """The other objective, and steps whose last micro-batch is empty and skipped."""
    objective = dataclasses.replace(masked_lm_objective("per_sequence"), skips_empty=True)
    one, many = (
        make_engine(*each[:2], transport=each[2], objective=objective) for each in (ONE_DEVICE, case)
    )
    batches = []
    for step in range(3):
        batch = {feature.name: batch_at(step)[feature.name] for feature in objective.features}
        half = np.arange(len(batch["token_ids"])) < (8 if step < 2 else 16)
        batches.append({name: np.where(half[:, None], values, 0) for name, values in batch.items()})
    for batch in batches:
        want = to_floats(one.train_step(batch))
        found = to_floats(many.train_step(batch))
        assert {name: found[name] for name in want} == pytest.approx(want, rel=1e-5)
    weights = values_of(many.weights())
    for name, values in values_of(one.weights()).items():
        if not name.endswith("key/bias"):
            np.testing.assert_allclose(weights[name], values, atol=1e-5, rtol=0, err_msg=name)
    state = values_of(many.training_state())
    for name, values in values_of(one.training_state()).items():
        if "seed" in name:
            np.testing.assert_array_equal(state[name], values)


@pytest.mark.parametrize(
    "case", [pytest.param(CASES[0], marks=pytest.mark.slow), CASES[3]], ids=lambda case: case[0]
)
def test_padding_does_not_count_in_the_clipping_of_updates(trained, case):
    """By StableAdamW, whose ratios are of means over all values of a weight."""
    one, many = (make_engine(*each[:2], optimizer=StableAdamW) for each in (ONE_DEVICE, case))
    padded = [v.path for v in many.model.trainable_variables if many.replicas.layout.shape_of(v) != v.shape]
    assert any("word_embeddings" in path for path in padded)
    for step in range(4):
        want, found = (to_floats(engine.train_step(batch_at(step))) for engine in (one, many))
        assert {name: found[name] for name in want} == pytest.approx(want, rel=1e-5)
    weights = values_of(many.weights())
    for name, values in values_of(one.weights()).items():
        if not name.endswith("key/bias"):
            np.testing.assert_allclose(weights[name], values, atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["optimus2d", "megatron1d"])
def test_in_bfloat16_it_is_one_device_but_for_rounding(trained, layout):
    want, found = (
        train(make_engine(*case, dtype="mixed_bfloat16"), [0])[0] for case in ((), (layout, (1, 2, 2)))
    )
    assert {name: found[name] for name in want} == pytest.approx(want, rel=2e-2)
    assert want["mlm_loss"] != trained(ONE_DEVICE).figures[0]["mlm_loss"]


@pytest.mark.parametrize("layout", ["optimus2d", "megatron1d"])
def test_what_is_computed_again_leaves_out_the_last_product(trained, layout):
    """Section 3.2.3, point 3, in the program: a block's last product is missing from what is repeated."""
    counts = {}
    for remat in (False, True):
        engine = make_engine(layout, (1, 2, 2), WITH_DROPOUT, remat=remat)
        (program,) = engine.step_programs(batch_at(0))
        kinds = [one.kind for one in find_collectives(read_module(program.text))]
        counts[remat] = kinds.count("all-gather") if layout == "optimus2d" else kinds.count("all-reduce")
    (figures,) = train(engine, [0])
    want = trained(ONE_DEVICE).figures[0]
    assert {name: figures[name] for name in want} == pytest.approx(want, rel=1e-6)
    again = counts[True] - counts[False]
    # A block gathers inputs and kernels of three products again, of four; or adds up once, of two times
    assert again == WITH_DROPOUT.num_hidden_layers * (6 if layout == "optimus2d" else 1)


@pytest.mark.usefixtures("trained")
def test_forms_for_cpus_are_taken_where_no_layout_spreads_the_model(monkeypatch):
    """Operations that XLA would have to divide among devices between a layout's products stay as they are."""
    taken, attention_scores = [], layers.attention_scores
    monkeypatch.setattr(
        layers,
        "attention_scores",
        lambda *of: taken.append(has_gradients_for_cpus()) or attention_scores(*of),
    )
    for layout, shape in (("none", None), ("optimus2d", (1, 2, 2)), ("megatron1d", (1, 2, 2))):
        engine = make_engine(layout, shape)
        taken.clear()
        engine.compiled_train_step.trace(*engine.step_arguments(batch_at(0)))
        assert taken and set(taken) == {layout == "none"}


def attend_plainly(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, dropout=None):
    """The result of a fused kernel."""
    scores_BNSS = jnp.einsum("bsnh,btnh->bnst", query_BSNH, key_BSNH)
    is_own_B1SS = (sequence_ids_BS[:, :, None] == sequence_ids_BS[:, None, :])[:, None]
    shares_BNSS = jax.nn.softmax(jnp.where(is_own_B1SS, scores_BNSS, -1e9), axis=-1)
    if dropout is not None:
        words = (words_BNS[..., None] for words_BNS in dropout[1:])
        is_kept_BNSS = is_kept(dropout.rate, *words, jnp.arange(shares_BNSS.shape[-1], dtype="uint32"))
        shares_BNSS = jnp.where(is_kept_BNSS, shares_BNSS / (1 - dropout.rate), 0.0)
    return jnp.einsum("bnst,btnh->bsnh", shares_BNSS, value_BSNH)


@pytest.mark.parametrize(
    ("layout", "config"), [("optimus2d", WITH_DROPOUT), ("megatron1d", WITH_DROPOUT), ("megatron1d", WIDE)]
)
def test_a_fused_kernel_gets_the_heads_of_its_device(trained, layout, config):
    config = dataclasses.replace(config, num_hidden_layers=1)
    want, _ = make_engine(config=config).gradients(batch_at(0))
    seen = []

    def attend(query_BSNH, *arguments, **dropout):
        seen.append((len(query_BSNH), query_BSNH.shape[2]))
        return attend_plainly(query_BSNH, *arguments, **dropout)

    engine = make_engine(layout, (1, 2, 2), config, attend=attend)
    found, _ = engine.gradients(batch_at(0))
    for variable, one, other in zip(engine.model.trainable_variables, want, found, strict=True):
        assert set(seen) == {(4, 8) if layout == "optimus2d" else (8, 4)}  # packs and heads of a device
        other = np.asarray(other)[tuple(map(slice, one.shape))]
        assert np.abs(one - other).max() <= 2e-6 * np.abs(one).max() + 1e-9, variable.path
