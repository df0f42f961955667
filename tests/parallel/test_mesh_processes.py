"""Packs of a mesh that each of several processes computes, and that processes and mesh fit."""

import pytest

from bert_packed.core.settings import InputError
from bert_packed.parallel.replicas import check_processes, count_replicas, group_of


@pytest.mark.parametrize(
    ("num_processes", "num_replicas", "groups"),
    [
        (1, 4, [(0, 1)]),
        (2, 4, [(0, 2), (1, 2)]),
        (4, 4, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (4, 2, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (3, 1, [(0, 1)] * 3),
    ],
)
def test_processes_of_one_replica_compute_the_same_packs(num_processes, num_replicas, groups):
    found = [group_of(index, num_processes, num_replicas) for index in range(num_processes)]
    assert found == groups
    check_processes(num_processes, num_replicas)


@pytest.mark.parametrize(("num_processes", "num_replicas"), [(4, 6), (3, 2)])
def test_processes_that_have_parts_of_replicas_are_refused(num_processes, num_replicas):
    message = f"Received: {num_processes} processes, {num_replicas} parts"
    with pytest.raises(InputError, match=message):
        check_processes(num_processes, num_replicas)


def test_rows_divide_packs_under_optimus_alone():
    assert count_replicas("optimus2d", (2, 3, 3)) == 6
    assert count_replicas("megatron1d", (2, 3, 3)) == 2
