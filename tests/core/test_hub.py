"""Names of the hub: the real client against a local one, what it gives and each way in which it fails."""

from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from local_hub import TOKEN, point_to, serve

from bert_packed.core import storage
from bert_packed.core.hub import find_model, in_cache, name_of, push_folder
from bert_packed.core.settings import InputError
from data_gen.text.corpus import TextDocuments
from data_gen.text.sources import find_text_sources

NAME = "owner/a-model"
FILES = {"config.json": b"{}", "vocab.txt": b"the\n", "model.safetensors": bytes(1000)}
FILES["1_Pooling/config.json"] = b"[]"
SKIPPED = {"pytorch_model.bin": b"pickle", "model.fp16.safetensors": b"again", "onnx/model.onnx": b"onnx"}


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def content_of(folder):
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


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
    commit = hub.commits["plain" if repo == "plain" else NAME][-1]
    assert name_of(folder) == f"{repo}@{commit}" == name_of(f"{folder}/")
    assert f"init_checkpoint is {repo}@{commit} from the hub, in {folder}" in caplog.text
    assert content_of(folder) == FILES  # nothing that is not read
    assert in_cache(name_of(folder)) == folder


@pytest.mark.parametrize("prepare", [log_in, break_off(3)])
def test_the_client_does_the_rest(hub, monkeypatch, prepare):
    """Token of the environment; a transfer that breaks is resumed, not begun again."""
    prepare(hub, monkeypatch)
    assert name_of(find_model(NAME)) == f"{NAME}@{hub.commits[NAME][-1]}"


@pytest.mark.parametrize(
    ("name", "prepare", "reason"),
    [
        ("owner/none", None, "the hub has none of that name, or it is private"),
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
    assert name_of(find_model(NAME, "other/model@1")) == f"{NAME}@{hub.commits[NAME][-1]}" != begun
    hub.asked.clear()
    assert name_of(find_model(NAME, begun)) == begun == name_of(find_model(begun)) and not hub.asked
    offline(hub, monkeypatch)
    assert name_of(find_model(begun)) == begun


DATA = "owner/a-text"


@pytest.fixture(scope="module")
def data_set(tmp_path_factory):
    """Files of Parquet, most of which is another column, and of lines."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = {"a.txt": b"One fish.\n\nTwo fish.\n", "b.jsonl": b'{"body": "Red."}'}
    folder = write(tmp_path_factory.mktemp("texts"), files)
    (folder / "data").mkdir()
    noise = np.random.default_rng(0).bytes(2**24)
    for split in ("train", "test"):
        table = pa.table({"body": [f"{split} fish."] * 4, "image": [noise[n::4] for n in range(4)]})
        pq.write_table(table, folder / f"data/{split}-00000-of-00001.parquet", compression="none")
    return folder


@pytest.fixture
def texts(hub, data_set):
    hub.add(DATA, data_set)
    return f"hf://datasets/{DATA}"


def read(pattern, is_verbatim=False, column="body"):
    paths = [path for source in find_text_sources(pattern) for path in source.paths]
    return paths, [text for _, text in TextDocuments(tuple(paths), is_verbatim, column)]


def test_a_split_of_a_data_set_is_streamed(hub, texts):
    hub.breaks["data/train-00000-of-00001.parquet"] = 2  # the client asks again
    (path,), found = read(f"{texts}/data/train-*.parquet:2")
    assert found == ["train fish."] * 4
    # Another commit is another path, and no later push is read
    assert path == f"{texts}@{hub.commits[DATA][-1]}/data/train-00000-of-00001.parquet"
    local = hub.folders[DATA] / "data/train-00000-of-00001.parquet"
    assert storage.file_sha256(path) == storage.file_sha256(local)
    assert 0 < hub.num_sent < storage.size_and_time(path)[0] / 2


def test_lines_of_a_data_set_are_read(texts):
    for revision in ("", "@main", "@refs/convert/parquet"):
        assert read(f"{texts}{revision}/a.txt")[1] == ["One fish.", "Two fish."]
    paths, found = read(f"{texts}/a.txt,{texts}/*.jsonl", is_verbatim=True)
    assert len(paths) == 2 and found == ["One fish.", "Two fish.", "Red."]


@pytest.mark.parametrize(
    ("pattern", "prepare", "reason"),
    [
        ("hf://datasets/owner/none/a.txt", None, "must be one that the hub gives.*none/.*the hub has none"),
        ("~@v9/a.txt", None, "the hub has no such revision of it"),
        ("~/none-*.parquet", None, "must match at least one file"),
        ("~/data/*.parquet", lambda hub, _: hub.gated.add(DATA), "granted access"),
        ("~/data/*.parquet", offline, "HF_HUB_OFFLINE is set"),
        ("~/data/*.parquet", gone, "ConnectError: .*refused"),
        ("~/data/*.parquet", lambda hub, _: hub.fails.add("data/test-00000-of-00001.parquet"), "500"),
        ("~/b.jsonl", lambda hub, _: hub.breaks.update({"b.jsonl": 99}), "RemoteProtocolError: peer closed"),
        ("~/b.jsonl", None, r"must have `no` \(a string\) or `no` \(a list"),
        ("~/data/*.parquet", None, "a table must have a column `no`, by text_column"),
    ],
)
def test_failures_of_data_sets_are_one_line(hub, texts, monkeypatch, pattern, prepare, reason):
    if prepare:
        prepare(hub, monkeypatch)
    with pytest.raises(InputError, match=reason) as caught:
        read(pattern.replace("~", texts), column="no" if "`no`" in reason else "body")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("token", "name", "reason"),
    [
        (TOKEN, "owner/mine", ""),
        (TOKEN, "owner/broken", "500"),
        ("hf_other", "owner/mine", "403"),
        ("", "owner/mine", "LocalTokenNotFoundError|403"),
    ],
)
def test_a_folder_is_pushed_or_stays_whole(hub, tmp_path, monkeypatch, token, name, reason):
    monkeypatch.setenv("HF_TOKEN", token)
    hub.fails.add("owner/broken")
    folder = write(tmp_path / "export", FILES)
    if reason:
        with pytest.raises(
            InputError, match=rf"`push_to_hub` must be .* Received: {name}; .*({reason}).*\.$"
        ):
            push_folder(folder, name)
        assert not hub.uploads
    else:
        assert push_folder(folder, name).endswith(f"/owner/mine/commit/{'0' * 40}")
        assert hub.uploads == {"owner/mine": FILES}
    assert content_of(folder) == FILES
