"""Training on two hosts, each a network of its own: what they compute, and how they end when one is lost.

This file alone catches what works within one host only: addresses, names, a link that is cut, whose end no
process is told.
"""

import signal

import pytest
from cluster import RunningCluster, last_step, reason_against_two_hosts, two_hosts
from pretraining_command import assert_same_run
from test_several_processes import STOPPED, command_of, data, uninterrupted  # noqa: F401  fixtures

from bert_packed.parallel.processes import STATUS_LOST

pytestmark = pytest.mark.slow
KILLED = -signal.SIGKILL
# What befalls a host, the statuses of both, and whom the survivors name
EVENTS = {
    "cut": (lambda pair, running: pair[1].cut(), [STATUS_LOST, STATUS_LOST], {0: 1, 1: 0}),
    "first": (lambda pair, running: running.send(0, signal.SIGKILL), [KILLED, STATUS_LOST], {1: 0}),
    "other": (lambda pair, running: running.send(1, signal.SIGKILL), [STATUS_LOST, KILLED], {0: 1}),
    "stop": (lambda pair, running: running.send(1, signal.SIGTERM), [STOPPED, STOPPED], {}),
}


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    if reason := reason_against_two_hosts():
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("backend", "event"),
    [("jax", "cut"), ("jax", "first"), ("jax", "other"), ("tensorflow", "cut"), ("tensorflow", "stop")],
)
def test_two_hosts_end_soon_and_continue(data, uninterrupted, tmp_path, backend, event):  # noqa: F811
    """To the bits of an uninterrupted run of two processes, which equals that of one."""
    befall, statuses, named = EVENTS[event]
    command = command_of(data, tmp_path / "run")
    with two_hosts() as pair:
        running = RunningCluster(tmp_path / "said", command, 2, backend, hosts=pair)
        running.wait_for(lambda: last_step(tmp_path / "run") >= 5)
        befall(pair, running)
        found = running.statuses(60)
    if found == [KILLED, -signal.SIGABRT]:  # JAX's service has noticed at the same moment
        return
    assert found == statuses, running.said()
    for index, lost in named.items():
        line = f"worker {lost} ({running.addresses[lost]}) was lost; the same commands continue from the last"
        assert line in running.err(index)[-1], running.said()
    if KILLED in statuses:  # a run of one host continues after that in test_several_processes.py
        return
    with two_hosts() as pair:
        again = RunningCluster(tmp_path / "again", command, 2, backend, hosts=pair)
        assert again.statuses() == [0, 0], again.said()
    assert_same_run(tmp_path / "run", uninterrupted(backend, 2))
