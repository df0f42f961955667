"""The kernels in Pallas's interpreter: the dense path's results and dropout, and no tile too many."""

import dataclasses
import functools

import finetuning_batches
import keras
import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import SHALLOW, make_engine, to_floats

from bert_packed.layers.dropout import Dropout, keep_mask, packs_from

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
from jax import numpy as jnp  # noqa: E402
from jax.experimental import pallas  # noqa: E402

from bert_packed.kernels.gpu import attention as gpu_attention  # noqa: E402
from bert_packed.kernels.tpu import attention as packed_attention  # noqa: E402

pytestmark = [
    pytest.mark.both_backends,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax"),
]

OF_RUNS = {"TILES": packed_attention.TILES, "GROUP": packed_attention.GROUP}
GPU_TILES = gpu_attention.TILES
TILE = 128
LENGTH = 3 * TILE
SEED = np.array([5, 7], np.uint32)
# Rows of the first pack come on both sides of 2**32 units
PLACE = 2**32 // LENGTH // 2 // LENGTH, 20_000


@pytest.fixture(autouse=True)
def small_tiles_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(packed_attention, "TILES", (TILE,))
    monkeypatch.setattr(packed_attention, "GROUP", TILE * packed_attention.LANES)
    monkeypatch.setattr(gpu_attention, "TILES", dict.fromkeys(gpu_attention.TILES, TILE))
    # The interpreter of `force_tpu_interpret_mode` cannot be rematerialised
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))


@pytest.fixture
def tiles_of_runs(small_tiles_in_the_interpreter, monkeypatch):
    for name, value in OF_RUNS.items():
        monkeypatch.setattr(packed_attention, name, value)
    monkeypatch.setattr(gpu_attention, "TILES", GPU_TILES)


@pytest.fixture(params=[packed_attention, gpu_attention], ids=["tpu", "gpu"])
def kernel(request):
    return request.param


def ids_of(runs, length):
    """Sequence ids of a pack of (id, number of tokens); padding fills it."""
    tokens = np.repeat(*np.transpose(runs or [(0, 0)]))[:length]
    return np.pad(tokens, (0, length - len(tokens))).astype(np.int32)


@pytest.fixture(scope="module", name="ids_BS")
def packs():
    """Packs with padding between sequences, without padding, and of nothing else."""
    packs = [[(1, 100), (0, 20), (2, 100), (3, 1), (4, 90)], [(1, 250), (2, 134)], []]
    return np.stack([ids_of(pack, LENGTH) for pack in packs])


def random_arrays(ids_BS, num_heads, head_width, dtype="float32"):
    """Query, key, value and weights of the result."""
    rng = np.random.default_rng(0)
    shape = (*ids_BS.shape, num_heads, head_width)
    return [jnp.asarray(rng.normal(size=shape) * scale, dtype) for scale in (0.5, 0.5, 1, 1)]


def rows_of(shape, rate):
    layer = Dropout(rate)
    layer.given_seed = SEED
    return layer.rows(shape)


def attend(query_BSNH, key_BSNH, value_BSNH, kernel, ids_BS, rate=0.0):
    num_packs, length, num_heads, _ = query_BSNH.shape
    with packs_from(*PLACE):
        dropout = rows_of((num_packs, num_heads, length, length), rate) if rate else None
        return kernel.attend(query_BSNH, key_BSNH, value_BSNH, jnp.asarray(ids_BS), dropout)


def attend_densely(query_BSNH, key_BSNH, value_BSNH, ids_BS, rate=0.0):
    """The definition: scores, mask, softmax, dropout, sum."""
    scores_BNSS = jnp.einsum("bsnh,btnh->bnst", query_BSNH, key_BSNH, precision="highest")
    mask_B1SS = (ids_BS[:, :, None] == ids_BS[:, None, :])[:, None]
    probs_BNSS = jax.nn.softmax(jnp.where(mask_B1SS, scores_BNSS, -1e9), axis=-1)
    keep_BNSS = keep_mask(probs_BNSS.shape, rate, SEED, *PLACE)
    kept_BNSS = jnp.where(keep_BNSS, probs_BNSS / (1 - rate), 0)
    return jnp.einsum("bnst,btnh->bsnh", kept_BNSS, value_BSNH, precision="highest")


def result_and_gradients(attend, query, key, value, weights):
    result, pull_back = jax.vjp(attend, query, key, value)
    gradients = pull_back(weights.astype(result.dtype))
    return [np.asarray(values, np.float32) for values in (result, *gradients)]


def compare_with_the_definition(kernel, ids_BS, dtype, rate, heads, tolerance):
    arrays = random_arrays(ids_BS, *heads, dtype)
    got = result_and_gradients(functools.partial(attend, kernel=kernel, ids_BS=ids_BS, rate=rate), *arrays)
    arrays = [of.astype("float32") for of in arrays]
    want = result_and_gradients(functools.partial(attend_densely, ids_BS=ids_BS, rate=rate), *arrays)
    for one, other in zip(got, want, strict=True):
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()


@pytest.mark.parametrize(
    ("dtype", "rate", "heads", "tolerance"),
    [
        ("float32", 0.0, (2, 24), 2e-6),  # on GPUs padded to 32
        ("float32", 0.1, (4, 64), 2e-6),  # two groups of two heads
        ("bfloat16", 0.1, (2, 16), 2**-6),
    ],
)
def test_results_and_gradients_are_those_of_the_definition(kernel, ids_BS, dtype, rate, heads, tolerance):
    compare_with_the_definition(kernel, ids_BS, dtype, rate, heads, tolerance)


def test_results_and_gradients_in_tiles_of_a_run(tiles_of_runs):
    """Two a pack, of 384 tokens: the first with a sequence in common, the second with none."""
    packs = [[(1, 300), (2, 200), (3, 150)], [(1, 384), (2, 200)]]
    ids_BS = np.stack([ids_of(pack, 768) for pack in packs])
    num_pairs, *_ = packed_attention.tiles_to_visit(jnp.asarray(ids_BS), 384)
    assert num_pairs == 4 + 2
    compare_with_the_definition(packed_attention, ids_BS, "float32", 0.1, (2, 16), 2e-6)


def test_results_and_gradients_in_tiles_of_a_run_on_a_gpu(tiles_of_runs):
    """Four and two a pack, as float32 has half as many tokens in one."""
    ids_BS = np.stack([ids_of(pack, 128) for pack in ([(1, 40), (2, 30), (3, 40)], [(1, 64), (2, 50)])])
    reach = gpu_attention.tiles_in_reach(jnp.asarray(ids_BS), 32)
    assert [values.tolist() for values in reach] == [
        [[0, 0, 1, 2], [0, 0, 2, 2]],
        [[2, 3, 4, 4], [2, 2, 4, 4]],
    ]
    for dtype, tolerance in (("float32", 2e-6), ("bfloat16", 2**-6)):
        compare_with_the_definition(gpu_attention, ids_BS, dtype, 0.1, (2, 16), tolerance)


def test_a_neighbour_changes_no_bit_and_gets_no_gradient(kernel, ids_BS):
    query, key, value, weights = random_arrays(ids_BS, 2, 16)
    is_mine_BS = ids_BS == 2
    assert is_mine_BS[:2].any(axis=1).all()
    is_mine = jnp.asarray(is_mine_BS)[:, :, None, None]
    run = functools.partial(attend, kernel=kernel, ids_BS=ids_BS, rate=0.1)
    found = result_and_gradients(run, query, key, value, weights * is_mine)
    others = [jnp.where(is_mine, of, 3 * of[::-1]) for of in (query, key, value)]
    for one, other in zip(found, result_and_gradients(run, *others, weights * is_mine), strict=True):
        np.testing.assert_array_equal(one[is_mine_BS], other[is_mine_BS])
    for gradient in found[1:]:
        assert np.all(gradient[~is_mine_BS] == 0) and np.abs(gradient[is_mine_BS]).max() > 1e-2


def pairs_by_hand(ids_BS, tile):
    """True where some token of one tile and of another have the same id: bool `[B, n, n]`."""
    tiles = np.split(ids_BS, ids_BS.shape[1] // tile, axis=1)
    meet = [
        [[bool(set(one[row]) & set(other[row])) for other in tiles] for one in tiles]
        for row in range(len(ids_BS))
    ]
    return np.array(meet)


def test_the_tiles_to_visit_may_attend_and_no_others():
    """A table of pairs on TPUs; on GPUs a range, for packs without padding between sequences."""
    rng = np.random.default_rng(0)
    length, tile, num_tiles = 512, 32, 16
    for has_gaps in (True, False):
        packs = []
        for longest in (20, 50, 100, 300):
            counts = rng.integers(1, longest, size=40)
            runs = [(number, count) for number, count in enumerate(counts, 1)]
            if has_gaps:
                runs = [part for run in runs for part in (run, (0, run[1] // 9))]
            packs += [ids_of(runs, length), ids_of(runs[:3], length)]
        ids_BS = np.stack(packs)
        expected = pairs_by_hand(ids_BS, tile)
        assert 0.2 < expected.mean() < 0.8
        num_pairs, *tables = packed_attention.tiles_to_visit(jnp.asarray(ids_BS), tile)
        rows, *numbers = np.nonzero(expected)
        assert num_pairs == len(rows)
        for table, of_rows in zip(tables, numbers, strict=True):
            before, found, after = np.split(np.asarray(table), [1, 1 + num_pairs])
            np.testing.assert_array_equal(found, rows * num_tiles + of_rows)
            assert np.all(before == -num_tiles) and np.all(after == -num_tiles)
    first_Bn, end_Bn = map(np.asarray, gpu_attention.tiles_in_reach(jnp.asarray(ids_BS), tile))
    places = np.arange(num_tiles)
    found = (first_Bn[..., None] <= places) & (places < end_Bn[..., None])
    np.testing.assert_array_equal(found, expected)


@pytest.fixture
def one_pack_per_tile(kernel):
    """The same pack four times, and which of its four tiles may attend to which."""
    if kernel is packed_attention:  # tiles 0 and 1 have a sequence in common, 0 and 2 padding
        runs = [(1, 100), (0, 20), (2, 2 * TILE - 120), (3, 90), (0, TILE - 90), (4, TILE)]
    else:  # a range: tiles 0 and 1 have a sequence in common, 2 and 3 padding
        runs = [(1, 100), (2, 2 * TILE - 100), (3, 90)]
    ids_BS = np.tile(ids_of(runs, 4 * TILE), (4, 1))
    (expected, *_) = pairs_by_hand(ids_BS, TILE)
    assert expected.sum() == 8
    return ids_BS, expected


def poisoned(values_BSNH):
    """Values that are NaN in the tile that has the number of the pack."""
    tiles = jnp.arange(values_BSNH.shape[1]) // TILE == jnp.arange(len(values_BSNH))[:, None]
    return jnp.where(tiles[:, :, None, None], jnp.nan, values_BSNH)


def reached(values_BSNH, by=np.any):
    """`[poisoned tile, tile]`: True where any or all values are not numbers."""
    num_packs, length = values_BSNH.shape[:2]
    return by(np.isnan(np.asarray(values_BSNH)).reshape(num_packs, length // TILE, -1), axis=-1)


def test_no_other_tile_is_visited_forward_and_backward(kernel, one_pack_per_tile):
    """A tile that is computed, if only to be hidden, leaves its poison in the sum: 0 times not a number."""
    ids_BS, expected = one_pack_per_tile
    query, key, value, weights = random_arrays(ids_BS, 2, 16)
    run = functools.partial(attend, kernel=kernel, ids_BS=ids_BS, rate=0.1)
    np.testing.assert_array_equal(reached(run(query, key, poisoned(value))), expected)
    _, _, key_gradient, value_gradient = result_and_gradients(run, query, key, value, poisoned(weights))
    np.testing.assert_array_equal(reached(key_gradient), expected)
    np.testing.assert_array_equal(reached(value_gradient), expected)
    # Forward, scores of poisoned keys are hidden from other sequences, whose results stay numbers
    result, query_gradient, *_ = result_and_gradients(run, query, poisoned(key), value, weights)
    assert not reached(result, np.all)[1, 0]
    np.testing.assert_array_equal(reached(query_gradient, np.all), expected)
    np.testing.assert_array_equal(reached(query_gradient), expected)


@pytest.mark.parametrize(
    ("kernel", "remat", "micro_batch_size", "kind"),
    [
        (packed_attention, True, None, "pretraining"),
        (gpu_attention, True, 2, "pretraining"),
        (packed_attention, False, 2, "weighted"),
        (gpu_attention, False, 2, "tags"),
    ],
)
def test_a_model_drops_the_units_that_the_dense_model_drops(kernel, remat, micro_batch_size, kind):
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2}
    config = dataclasses.replace(SHALLOW, max_position_embeddings=TILE, **rates)
    batches = packed_and_unpacked if kind == "pretraining" else finetuning_batches.packed_and_unpacked
    packed = {name: values[:4] for name, values in batches(max_seq_length=TILE)[0].items()}
    options = {"micro_batch_size": micro_batch_size, "objective": finetuning_batches.KINDS.get(kind)}
    dense, fused = (
        make_engine(config=config, build={"remat": remat, **attend}, **options)
        for attend in ({}, {"attend": kernel.attend})
    )
    want, want_sums = dense.gradients(packed)
    got, got_sums = fused.gradients(packed)
    assert to_floats(got_sums) == pytest.approx(to_floats(want_sums), rel=1e-5)
    for variable, one, other in zip(dense.model.trainable_variables, got, want, strict=True):
        scale = 0.1 if variable.path.endswith("key/bias") else np.abs(other).max()
        assert np.abs(one - other).max() <= 1e-5 * scale, variable.path
