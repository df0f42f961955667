"""Description of a cluster: TF_CONFIG, one line for every mistake in it, and the meeting of its processes."""

import contextlib
import json
import socket
import sys
import threading
import time
import types

import pytest

from bert_packed.core.settings import InputError
from bert_packed.parallel import cluster
from bert_packed.parallel.cluster import Cluster, JaxService, meet, read_cluster
from bert_packed.parallel.processes import ALONE

WORKERS = ["a:1", "b:2"]


def config(workers=WORKERS, index=1, kind="worker", **jobs):
    return json.dumps({"cluster": {"worker": workers, **jobs}, "task": {"type": kind, "index": index}})


def test_a_cluster_is_read():
    assert read_cluster(config()) == Cluster(("a:1", "b:2"), 1)
    assert read_cluster(config(["[::1]:80"], "0")) == Cluster(("[::1]:80",), 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"^TF_CONFIG must hold .* where distribution is multi_worker\. Received: nothing\.$"),
        ("{", r"must be JSON of the form .* Received: \{\."),
        ('{"cluster": {"worker": ["a:1"]}}', r"must be JSON of the form"),
        (config(kind="evaluator"), r"tasks of type worker alone\. Received: evaluator\."),
        (config(chief=["c:3"]), r"tasks of type worker alone\. Received: chief\."),
        (config([]), r'list the workers as "HOST:PORT"\. Received: \[\]\.'),
        (config("a:1"), r'list the workers as "HOST:PORT"\. Received: a:1\.'),
        (config(["a:1", ":2"]), r'list the workers as "HOST:PORT"'),
        (config(["a:1", "b:65536"]), r'list the workers as "HOST:PORT"'),
        (config(["a:1", "b:2", "a:1"]), r"name every worker once\. Received: a:1 twice\."),
        (config(index=2), r"index from 0 and below the number of workers, 2\. Received: 2\."),
        (config(index=-1), r"Received: -1\."),
        (config(index=True), r"Received: True\."),
    ],
)
def test_mistakes_in_its_description(text, message):
    with pytest.raises(InputError, match=message) as caught:
        read_cluster(text)
    assert "\n" not in str(caught.value)


def test_one_process_needs_no_description(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for distribution in ("none", "mirrored", "tpu"):
        assert cluster.start(distribution, "jax") is ALONE
    with pytest.raises(InputError, match="TF_CONFIG must hold"):
        cluster.start("multi_worker", "jax")


def meet_all(addresses, indices, seconds):
    """Meet as some processes of a cluster: whom each is connected with, or what it raised."""
    found = {}

    def run(index):
        try:
            with contextlib.ExitStack() as met:
                connections = meet(Cluster(addresses, index), seconds)
                found[index] = sorted(connections)
                for one in connections.values():
                    met.enter_context(one)
        except InputError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in indices]
    for thread in threads:
        thread.start()
    return threads, found


@pytest.fixture
def addresses(monkeypatch):
    monkeypatch.setattr(cluster, "RETRY_SECONDS", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as some:
        port = some.getsockname()[1]
    return (f"127.0.0.1:{port}", "localhost:2", "127.0.0.1:3")


def join(threads):
    for thread in threads:
        thread.join(60)


def test_processes_meet_in_any_order_of_arrival(addresses):
    late, found = meet_all(addresses, (2,), 30)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(addresses[0][10:])), 1)
    first, of_first = meet_all(addresses, (0,), 30)
    for thread in (*first, *late):
        thread.join(0.3)
        assert thread.is_alive()  # one is missing
    last, of_last = meet_all(addresses, (1,), 30)
    join([*first, *late, *last])
    assert {**found, **of_first, **of_last} == {0: [1, 2], 1: [0], 2: [0]}


def test_missing_and_lost_workers_are_named(addresses):
    port = int(addresses[0][10:])
    threads, found = meet_all(addresses, (0,), 3)
    for said in (b"1\n", b"GET /\n", b""):
        for _ in range(200):
            with contextlib.suppress(OSError):
                with socket.create_connection(("127.0.0.1", port), 1) as other:
                    other.sendall(said)
                break
            time.sleep(0.01)
    # The last one comes only now: before, all would be there for a moment
    last, of_last = meet_all(addresses, (2,), 3)
    join([*threads, *last])
    rule = f"all 3 workers of the cluster, the first at {addresses[0]}, must come up within 3 seconds."
    assert {**found, **of_last} == {
        0: f"{rule} Received: no worker 1 at localhost:2.",
        2: f"{rule} Received: fewer, or no way to the first.",
    }


@pytest.mark.parametrize(
    ("host", "received"),
    [("127.0.0.1", "Address already in use"), ("192.0.2.1", "Cannot assign requested address")],
)
def test_an_address_that_is_not_free_is_said_at_once(addresses, host, received):
    """One of a network of examples is of no machine."""
    port = addresses[0][10:]
    with socket.create_server(("", int(port))):
        threads, found = meet_all((f"{host}:{port}", f"{host}:1"), (0,), 60)
        join(threads)
    assert f"Received: process 0 cannot listen there: {received}" in found[0]


def test_processes_meet_at_no_other_address(addresses):
    """The rendezvous listened at all addresses of the machine."""
    port = int(addresses[0][10:])
    with socket.create_server(("127.0.0.2", port)):
        threads, found = meet_all(addresses[:2], (0, 1), 30)
        join(threads)
    assert found == {0: [1], 1: [0]}


@pytest.fixture
def debian(monkeypatch):
    """A machine whose own name has a loopback address, as Debian sets it up: that name."""
    known = {"host-a": "127.0.1.1", "10.0.0.1": "10.0.0.1", "127.0.0.1": "127.0.0.1"}

    def find(host, port, **_):
        if ".." in host:
            raise UnicodeError("label empty or too long")
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], port or 0))]

    monkeypatch.setattr(socket, "getaddrinfo", find)
    monkeypatch.setattr(socket, "gethostname", lambda: "host-a")
    return "host-a"


@pytest.mark.parametrize(
    ("hosts", "index", "name", "received"),
    [
        (("host-a", "host-b"), 0, "host-a", "127.0.1.1, a loopback address"),
        (("10.0.0.1", "10.0.0.2"), 0, "host-a", "127.0.1.1, a loopback address"),
        (("127.0.0.1", "host-b"), 0, "127.0.0.1", "127.0.0.1, a loopback address"),
        (("10.0.0.1", "10.0.0.2"), 0, "host-c", "Name or service not known"),
        (("10.0.0.1", "10.0.0.2"), 0, "host..c", "label empty or too long"),
        (("10.0.0.1", "10.0.0.2"), 0, "10.0.0.1", ""),
        (("host-a", "host-a"), 0, "host-a", ""),  # one machine
        (("host-a", "localhost"), 1, "host-a", ""),
        (("127.0.0.1", "localhost", "[::1]"), 0, "host-a", ""),
    ],
)
def test_a_loopback_name_among_several_machines(debian, hosts, index, name, received):
    """Other machines waited for this one until their time was over."""
    some = Cluster(tuple(f"{host}:{number}" for number, host in enumerate(hosts, 1)), index)
    if not received:
        some.check_reachable(name, "a name")
        return
    rule = f"{name}, a name, must have an address that other machines reach: give it one in this machine's"
    with pytest.raises(InputError) as caught:
        some.check_reachable(name, "a name")
    assert str(caught.value) == f"{rule} /etc/hosts. Received: {received}."


def test_the_first_worker_must_not_have_a_loopback_name(debian):
    with pytest.raises(InputError, match=r"^host-a, the first worker of TF_CONFIG, must have an address"):
        meet(Cluster(("host-a:1", "host-b:2"), 0), 60)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_gloo_publishes_no_loopback_address(debian, monkeypatch, platform):
    """It failed after half a minute, with another message; other devices do without it."""
    called = []
    multihost = types.SimpleNamespace(sync_global_devices=lambda _: called.append("sync"))
    jax = types.SimpleNamespace(
        config=types.SimpleNamespace(update=lambda *_: None),
        distributed=types.SimpleNamespace(
            initialize=lambda *_, coordinator_bind_address, **__: called.append(coordinator_bind_address)
        ),
        default_backend=lambda: platform,
    )
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax.experimental", types.SimpleNamespace(multihost_utils=multihost))
    some = Cluster(("10.0.0.1:1", "10.0.0.2:2"), 0)
    if platform == "gpu":
        JaxService(some, 5)
        assert called == ["10.0.0.1:1", "sync"]
        return
    with pytest.raises(InputError, match=r"^host-a, this machine's name, .*Gloo.* Received: 127\.0\.1\.1, a"):
        JaxService(some, 5)
    assert called == ["10.0.0.1:1"]
