"""Collectives of a program: every form of groups, bytes by hand, and a program of JAX on four devices."""

import os
import subprocess
import sys

import keras
import pytest

from bert_packed.training.collectives import find_collectives, read_groups, summarise
from bert_packed.training.hlo import read_module


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add", [[0, 1], [2, 3]]),
        ("replica_groups={{0}, {1}}", [[0], [1]]),
        ("replica_groups={}, to_apply=%add", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("channel_id=1, to_apply=%add", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=[2,4]<=[8], use_global_device_ids=true", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[1,8]<=[8]", [list(range(8))]),
        # 4 rows of 2, transposed: the first of each row, then the second
        ("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%a", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['x'=2,'y'=4] {'x'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['x'=2,'y'=1,'z'=4] {'x','z'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=mesh[axis_0=2,axis_1=2] {axis_1,axis_0}", [[0, 2, 1, 3]]),
        # of an axis of 8 the 2 that follow a first 2: numbers as abc in binary, b is in the group
        ("replica_groups=mesh['x'=8] {'x':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['x'=8] {'x':(1)2,'x':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups=mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,2},{2,0},{1,3}}", [[0, 2], [2, 0], [1, 3]]),
    ],
)
def test_every_form_of_groups(text, groups):
    assert [list(group) for group in read_groups(f", {text}", 8)] == groups


def test_a_form_that_is_unknown_is_an_error():
    with pytest.raises(ValueError, match=r"must have a known form. Received: \?"):
        read_groups("replica_groups=?1,2?", 8)


PROGRAM = """
HloModule step, replica_count=2, num_partitions=4

%gather (p: f32[4,8]) -> f32[8,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %inside = f32[8,8]{1,0} all-gather(%p), replica_groups=[4,2]<=[8], dimensions={0}
}

%body (t: (s32[], bf16[10])) -> (s32[], bf16[10]) {
  %t = (s32[], bf16[10]{0}) parameter(0)
  %v = bf16[10]{0} get-tuple-element(%t), index=1
  %passed = bf16[10]{0} collective-permute(%v), source_target_pairs={{0,1},{1,0}}
  ROOT %r = (s32[], bf16[10]{0}) tuple(%n, %passed)
}

ENTRY %main (a: f32[4,8], b: f32[16]) -> f32[16] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[16]{0} parameter(1)
  %sum = (f32[4,8]{1,0}, f32[16]{0}) all-reduce(%a, %b), replica_groups={}, to_apply=%add
  %begun = f32[16]{0} all-reduce-start(%b), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %done = f32[16]{0} all-reduce-done(%begun)
  %asked = ((f32[4,8]{1,0}), f32[8,8]{1,0}) async-start(%a), calls=%gather
  %got = f32[8,8]{1,0} async-done(%asked)
  %w = (s32[], bf16[10]{0}) while(%s), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %scattered = f32[2]{0} reduce-scatter(%b), replica_groups={}, dimensions={0}, to_apply=%add
}
"""


def test_kinds_bytes_and_executions():
    module = read_module(PROGRAM)
    assert module.num_devices == 8
    found = find_collectives(module)
    assert [(one.kind, one.operand_bytes, one.group_size, one.times) for one in found] == [
        ("all-reduce", 4 * 8 * 4 + 16 * 4, 8, 1),
        ("all-reduce", 16 * 4, 2, 1),
        ("all-gather", 4 * 8 * 4, 2, 1),
        ("collective-permute", 10 * 2, 2, 6),
        ("reduce-scatter", 16 * 4, 8, 1),
    ]
    rows = [tuple(row.values()) for row in summarise([*found, found[1]])]
    assert rows == [
        ("all-reduce", 8, 1, 1, 192),
        ("all-reduce", 2, 2, 2, 128),
        ("all-gather", 2, 1, 1, 128),
        ("collective-permute", 2, 1, 6, 120),
        ("reduce-scatter", 8, 1, 1, 64),
    ]


ON_FOUR_DEVICES = """
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from bert_packed.training.engines.virtual_devices import make_virtual_devices
from bert_packed.training.collectives import find_collectives
from bert_packed.training.hlo import read_module

make_virtual_devices(4)
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

def exchange(a):  # [4, 4] on each device
    a = jax.lax.psum(a, "y")
    a = jax.lax.ppermute(a, "x", [(0, 1), (1, 0)])
    return jax.lax.all_gather(a, "x"), jax.lax.psum_scatter(a, ("x", "y"), tiled=True)

specs = PartitionSpec("x", "y"), (PartitionSpec(None, "x", "y"), PartitionSpec("x", "y"))
shared = jax.shard_map(exchange, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
product = jax.jit(lambda a: jax.numpy.sum(a @ a.T))
for function in (jax.jit(shared), product):
    a = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, specs[0]))
    module = read_module(function.lower(a).compile().as_text())
    assert module.num_devices == len(jax.devices()) == 4
    for one in find_collectives(module):
        print(one.kind, one.operand_bytes, *("".join(map(str, group)) for group in one.groups))
"""


@pytest.mark.slow
@pytest.mark.both_backends
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax")
def test_what_is_asked_of_jax_is_what_is_found():
    command = [sys.executable, "-c", ON_FOUR_DEVICES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    asked, product = done.stdout.splitlines()[:4], done.stdout.splitlines()[4:]
    assert sorted(asked) == [
        "all-gather 64 02 13",
        "all-reduce 64 01 23",
        "collective-permute 64 02 20 13 31",
        "reduce-scatter 64 0123",
    ]
    # the sum over the whole mesh ends it, however the compiler gets there
    assert product and product[-1].startswith("all-reduce 4 ")
