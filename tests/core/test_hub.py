"""Names of the hub: the real client against a local one, what it gives and each way in which it fails."""

import huggingface_hub.constants as constants
import pytest
from local_hub import TOKEN, point_to, serve

from bert_packed.core.hub import find_model, in_cache, name_of
from bert_packed.core.settings import InputError

NAME = "owner/a-model"
FILES = {"config.json": b"{}", "vocab.txt": b"the\n", "model.safetensors": bytes(1000)}
SKIPPED = {"pytorch_model.bin": b"pickle", "onnx/model.onnx": b"onnx"}


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serve() as (hub, url):
        point_to(monkeypatch, url, tmp_path / "cache")
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
        monkeypatch.chdir(tmp_path)
        hub.add(NAME, write(tmp_path / "served", {**FILES, **SKIPPED}))
        hub.add("plain", write(tmp_path / "plain_served", FILES))
        hub.add("owner/pickled", write(tmp_path / "pickled", {"config.json": b"{}", **SKIPPED}))
        hub.moved["owner/old"] = NAME
        yield hub


def offline(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def gate(hub, monkeypatch):
    hub.gated.add(NAME)


def log_in(hub, monkeypatch):
    gate(hub, monkeypatch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def break_off(times):
    return lambda hub, monkeypatch: hub.breaks.update({"model.safetensors": times})


def gone(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.parametrize("name", [NAME, f"{NAME}@main", "plain", "owner/old"])
def test_a_name_becomes_a_folder(hub, name, caplog):
    with caplog.at_level("INFO", "bert_packed"):
        folder = find_model(name)
    repo = name.partition("@")[0]
    commit = hub.commits["plain" if repo == "plain" else NAME]
    assert name_of(folder) == f"{repo}@{commit}" == name_of(f"{folder}/")
    assert f"init_checkpoint is {repo}@{commit} from the hub, in {folder}" in caplog.text
    found = {path.name: path.read_bytes() for path in type(hub.folders[NAME])(folder).iterdir()}
    assert found == FILES  # nothing that is not read
    assert in_cache(name_of(folder)) == folder


@pytest.mark.parametrize("prepare", [log_in, break_off(3)])
def test_the_client_does_the_rest(hub, monkeypatch, prepare):
    """Token of the environment; a transfer that breaks is resumed, not begun again."""
    prepare(hub, monkeypatch)
    assert name_of(find_model(NAME)) == f"{NAME}@{hub.commits[NAME]}"


@pytest.mark.parametrize(
    ("name", "prepare", "reason"),
    [
        ("owner/none", None, "the hub has no such model, or it is private"),
        (f"{NAME}@v9", None, "the hub has no such revision of it"),
        (NAME, gate, "only to accounts that were granted access, by HF_TOKEN"),
        (NAME, offline, "it is not whole in the cache, and HF_HUB_OFFLINE is set"),
        (NAME, break_off(99), "RemoteProtocolError: peer closed connection without sending complete"),
        (NAME, gone, "ConnectError: .*refused"),
        ("owner/pickled", None, "without; a .bin is not read"),
        ("a/b/c", None, ""),
        ("./none", None, ""),
        ("gs://a/b", None, ""),
    ],
)
def test_failures_are_one_line(hub, monkeypatch, name, prepare, reason):
    if prepare:
        prepare(hub, monkeypatch)
    rule = "`init_checkpoint` must be a folder, .*that exists, or NAME or NAME@REVISION of a model on the hub"
    with pytest.raises(InputError, match=rf"{rule}.* Received: {name}.*{reason}.*\.") as caught:
        find_model(name)
    assert "\n" not in str(caught.value)


def test_an_existing_path_wins(hub, tmp_path, caplog):
    with caplog.at_level("INFO", "bert_packed"):
        assert find_model("plain") != "plain"
        write(tmp_path / "plain", FILES)
        hub.asked.clear()
        assert find_model("plain") == name_of("plain") == in_cache("plain") == "plain"
    assert not hub.asked and f"init_checkpoint is the local folder {tmp_path / 'plain'}" in caplog.text
    (tmp_path / "bert_model.ckpt.index").touch()
    for path in ("", tmp_path, tmp_path / "bert_model.ckpt"):
        assert find_model(path) == str(path)


def test_a_run_keeps_its_commit(hub, monkeypatch):
    """A model that is pushed again is not another start; a whole cache needs no hub."""
    begun = name_of(find_model(NAME))
    hub.add(NAME, hub.folders[NAME], commit="2")
    offline(hub, monkeypatch)
    hub.asked.clear()
    assert name_of(find_model(NAME, begun)) == begun == name_of(find_model(begun)) and not hub.asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert name_of(find_model(NAME, "other/model@1")) == f"{NAME}@{hub.commits[NAME]}" != begun
