"""bfloat16: close to float32 in every architecture, and float32 where sums need it.

`test_packing_invisible.py` has neighbours and padding in bfloat16, too.
"""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES
from packs import VOCAB_SIZE, packed_and_unpacked
from tiny import CONFIG, to_floats

from bert_packed.architectures.mamba import model as mamba
from bert_packed.architectures.mamba2 import model as mamba2
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import FINETUNING_HEADS, PRETRAINING
from bert_packed.training.engines.engine import named_weights

BF16 = 2.0**-8  # half of the distance from 1 to the next number
DTYPE = "mixed_bfloat16"
pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]


@pytest.fixture(scope="module")
def packed():
    return packed_and_unpacked()[0]


def gradients_in_both(packed, biases=()):
    """Gradients of a BERT in bfloat16 and in float32, two dicts; the named biases are 4 instead of 0."""
    found = []
    for dtype in (DTYPE, "float32"):
        engine = ARCHITECTURES["bert"].engine({"dtype": dtype})
        weights = named_weights(engine.model)
        for name, weight in weights.items():
            if name.endswith(tuple(biases)):
                weight.assign(np.full(weight.shape, 4.0))
        gradients, _ = engine.gradients(packed, training=False)
        found.append(dict(zip(weights, gradients, strict=True)))
    return found


def relative(got, want):
    got, want = (np.asarray(keras.ops.cast(values, "float32")) for values in (got, want))
    return np.abs(got - want).max() / np.abs(want).max()


def dtype_of(values):
    return keras.backend.standardize_dtype(values.dtype)


def operations_of(model, batch):
    """Kind, inputs and outputs, each a shape and a dtype, of every operation of a forward pass."""
    if keras.backend.backend() == "jax":
        import jax

        yield from operations_of_jaxpr(jax.make_jaxpr(model)(batch).jaxpr)
        return
    import tensorflow as tf

    for operation in tf.function(model).get_concrete_function(batch).graph.get_operations():
        sides = operation.inputs, operation.outputs
        yield operation.type.lower(), *([(tuple(v.shape), v.dtype.name) for v in side] for side in sides)


def operations_of_jaxpr(jaxpr):
    from jax.extend.core import jaxprs_in_params

    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        for part in inner:
            yield from operations_of_jaxpr(part)
        if not inner:
            sides = equation.invars, equation.outvars
            found = ([(v.aval.shape, v.aval.dtype.name) for v in side] for side in sides)
            yield equation.primitive.name, *found


def rounded_share(values):
    """Share of numbers that bfloat16 cannot hold."""
    rounded = keras.ops.cast(keras.ops.cast(values, "bfloat16"), "float32")
    return np.mean(np.asarray(rounded != values))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_close_to_float32(name):
    """Its weights, logits and losses are float32; logits are not rounded on their way."""
    architecture = ARCHITECTURES[name]
    packed, unpacked = architecture.batches()
    mixed, exact = (architecture.engine({"dtype": dtype}) for dtype in (DTYPE, "float32"))
    assert keras.config.dtype_policy().name == "float32"  # of all other models
    assert {weight.dtype for weight in mixed.model.weights} == {"float32"}
    assert dtype_of(mixed.model.encode(packed)) == "bfloat16"
    sums = [to_floats(mixed.eval_step(batch)) for batch in (packed, unpacked)]
    want = to_floats(exact.eval_step(packed))
    for loss in architecture.objective.losses:
        assert sums[0][loss] == pytest.approx(sums[1][loss], rel=2 * BF16)
        assert sums[0][loss] == pytest.approx(want[loss], rel=8 * BF16)
    for logits, expected in zip(mixed.model(packed).values(), exact.model(packed).values(), strict=True):
        assert dtype_of(logits) == "float32" and rounded_share(logits) > 0.9
        assert 0 < relative(logits, expected) < 16 * BF16


def test_the_residuals_of_a_modern_bert_add_up_in_float32():
    architecture, seen = ARCHITECTURES["modernbert"], []
    model = architecture.model(dtype=DTYPE)
    for block in model.modern_bert.blocks:
        call = block.call
        block.call = lambda hidden_BSD, call=call, **given: (
            seen.append(dtype_of(hidden_BSD)) or call(hidden_BSD, **given)
        )
    model.encode(architecture.batches()[0])
    assert seen == ["float32"] * architecture.config.num_hidden_layers


@pytest.mark.parametrize(
    ("name", "module", "scan"), [("mamba", mamba, "ssm_pack"), ("mamba2", mamba2, "ssd_pack")]
)
def test_a_mamba_scans_in_float32(monkeypatch, name, module, scan):
    """Inputs are bfloat16, sizes of steps and results are not."""
    seen, function = [], getattr(module, scan)

    def note(*arguments, **options):
        found = function(*arguments, **options)
        seen.append([dtype_of(values) for values in (*arguments[:2], found[0])])
        return found

    monkeypatch.setattr(module, scan, note)
    architecture = ARCHITECTURES[name]
    architecture.model(dtype=DTYPE).encode(architecture.batches()[0])
    assert seen == [["bfloat16", "float32", "float32"]] * architecture.config.num_hidden_layers


def test_norms_round_their_result_alone():
    hidden = np.random.default_rng(0).normal(size=(2, 3, 64)).astype("float32")
    norm = mamba.RMSNorm(1e-5, dtype=DTYPE)
    norm.build(hidden.shape)
    found = norm(hidden)
    assert dtype_of(found) == "bfloat16"
    want = hidden / np.sqrt(np.mean(hidden**2, axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(np.asarray(keras.ops.cast(found, "float32")), want, rtol=1.001 * BF16)


@pytest.mark.parametrize("head", FINETUNING_HEADS)
def test_logits_of_fine_tuning_stay_float32(packed, head):
    outputs = build_model(head, CONFIG, 1, dtype=DTYPE, num_outputs=3)(packed)
    assert {dtype_of(values) for values in outputs.values()} == {"float32"}


def test_softmax_and_layer_norm_compute_in_float32(packed):
    operations = list(operations_of(build_model(PRETRAINING, CONFIG, 1, dtype=DTYPE), packed))
    assert "bfloat16" in {dtype for _, inputs, _ in operations for _, dtype in inputs}
    num_layers = CONFIG.num_hidden_layers
    for kinds, count in (({"exp", "softmax"}, num_layers), ({"rsqrt"}, 2 + 2 * num_layers)):
        found = [inputs for kind, inputs, _ in operations if kind in kinds]
        assert len(found) == count
        assert {dtype for inputs in found for _, dtype in inputs} == {"float32"}


def test_logits_are_never_rounded(packed):
    """Neither the product that makes them nor the bias rounds them."""
    model = build_model(PRETRAINING, CONFIG, 1, dtype=DTYPE)
    results = [result for _, _, outputs in operations_of(model, packed) for result in outputs]
    predictions = packed["prediction_ids"]
    for shapes in (
        [(predictions.size, VOCAB_SIZE), (*predictions.shape, VOCAB_SIZE)],
        [(*packed["cls_positions"].shape, 2)],
    ):
        dtypes = [dtype for of, dtype in results if of in shapes]
        assert len(dtypes) > 1 and set(dtypes) == {"float32"}


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_the_output_table_and_bias_are_not_rounded(name):
    head = ARCHITECTURES[name].model(dtype=DTYPE).predictions
    width = ARCHITECTURES[name].config.hidden_size
    hidden = np.random.default_rng(0).normal(size=(2, 5, width)).astype("float32")
    places, table = np.array([[0, 3], [1, 1]]), np.eye(VOCAB_SIZE, width, dtype="float32")

    def logits(scale):
        return np.asarray(head(hidden, places, keras.Variable(scale * table, autocast=False)))

    ones = logits(1)
    np.testing.assert_allclose(logits(1.001), 1.001 * ones, rtol=1e-5)
    bias = 1 + np.arange(VOCAB_SIZE, dtype="float32") / 1000
    (output_bias_V,) = (v for v in head.trainable_variables if v.path.endswith("output_bias"))
    output_bias_V.assign(bias)
    np.testing.assert_allclose(logits(1) - ones, np.broadcast_to(bias, ones.shape), rtol=1e-5)


def test_gradients_of_queries_stay_precise(packed):
    """Biases of keys are large, as in trained models: they multiply what is rounded alike in a row."""
    mixed, exact = gradients_in_both(packed, ["key/bias", "value/bias"])
    names = [name for name in mixed if name.endswith("query/kernel")]
    assert len(names) == CONFIG.num_hidden_layers
    for name in names:
        assert relative(mixed[name], exact[name]) < 32 * BF16, name


def test_the_gradient_of_a_table_is_summed_in_float32(packed):
    """The packs repeat 64 times: sums of a thousand tokens in bfloat16 would be off by many roundings."""
    mixed, exact = gradients_in_both({name: np.concatenate([values] * 64) for name, values in packed.items()})
    names = [name for name in mixed if "embeddings" in name and not name.endswith(("gamma", "beta"))]
    assert len(names) == 3
    for name in names:
        # Sums in bfloat16 are 83 roundings off under JAX, for the table of two rows
        assert relative(mixed[name], exact[name]) < 12 * BF16, name
