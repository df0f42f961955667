"""Every way to compute the scan that is timed gives what the chosen one gives, forward and backward."""

import numpy as np
import pytest
from keras import ops

from benchmarks.scan_variants import scan_variants
from bert_packed.models.selective_scan import CHUNK_LENGTH, ssm_pack
from bert_packed.training.engines.functional import gradient

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]
POSITIONS = np.r_[0:7, 0:31, 0:1, 0:25][None].astype(np.int32)  # two sequences start in the second chunk


def values_and_gradients(scan):
    """Of two chunks of one pack, three channels and two states."""
    rng, length = np.random.default_rng(0), POSITIONS.shape[1]
    assert length == 2 * CHUNK_LENGTH
    arrays = [
        rng.normal(size=(1, length, 3)),
        np.exp(rng.normal(size=(1, length, 3)) - 1),
        -np.exp(rng.normal(size=(2, 3))),
        rng.normal(size=(1, length, 2)),
        rng.normal(size=(1, length, 2)),
    ]
    given = [ops.convert_to_tensor(np.float32(one)) for one in arrays]
    weights = np.float32(rng.normal(size=(1, length, 3)))
    positions = ops.convert_to_tensor(POSITIONS)
    found = [
        scan(*given, positions)[0],
        *gradient(lambda x: ops.sum(weights * scan(*x, positions)[0]))(given),
    ]
    return [np.asarray(ops.convert_to_numpy(one)) for one in found]


@pytest.fixture(scope="module")
def wanted():
    return values_and_gradients(ssm_pack)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(scan_variants())[3:])  # the first are the chosen one, with other chunks
def test_a_variant_computes_the_same(name, wanted):
    found = values_and_gradients(scan_variants()[name])
    assert len(found) == len(wanted) == 6
    for one, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, want, atol=1e-5 * np.abs(want).max())


def test_the_chosen_one_comes_first():
    first, *others = scan_variants().values()
    assert first is ssm_pack and ssm_pack not in others
