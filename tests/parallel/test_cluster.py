"""How a cluster is described: TF_CONFIG, and one line for every mistake in it."""

import json
import socket

import pytest

from bert_packed.core.settings import InputError
from bert_packed.parallel import cluster
from bert_packed.parallel.cluster import Cluster, read_cluster
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
        ("[1]", r"must be JSON of the form"),
        ('{"cluster": {"worker": ["a:1"]}}', r"must be JSON of the form"),
        (config(kind="evaluator"), r"tasks of type worker alone\. Received: evaluator\."),
        (config(chief=["c:3"]), r"tasks of type worker alone\. Received: chief\."),
        (config([]), r'list the workers as "HOST:PORT"\. Received: \[\]\.'),
        (config("a:1"), r'list the workers as "HOST:PORT"\. Received: a:1\.'),
        (config(["a:1", "b"]), r'list the workers as "HOST:PORT"'),
        (config(["a:1", ":2"]), r'list the workers as "HOST:PORT"'),
        (config(["a:1", "b:65536"]), r'list the workers as "HOST:PORT"'),
        (config(["a:1", "b:2", "a:1"]), r"name every worker once\. Received: a:1 twice\."),
        (config(index=2), r"index from 0 and below the number of workers, 2\. Received: 2\."),
        (config(index=-1), r"Received: -1\."),
        (config(index=None), r"Received: None\."),
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


def test_the_first_waits_for_the_servers_of_the_others_and_names_who_is_missing():
    """Under TensorFlow it would wait in C++, for ever and deaf to signals."""
    from bert_packed.parallel.tensorflow_service import _wait_for_servers

    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as gone:
        addresses = ["127.0.0.1:1"] + [f"127.0.0.1:{one.getsockname()[1]}" for one in (there, gone)]
        _wait_for_servers(Cluster(tuple(addresses), 0), 5)
        gone.close()
        with pytest.raises(InputError, match=f"all 3 workers .* Received: no worker 2 at {addresses[2]}: "):
            _wait_for_servers(Cluster(tuple(addresses), 0), 0.1)
