"""Torch reads every pack once an epoch, whoever shares it, in an order that resumes at any pack."""

import itertools
import json
import subprocess
import sys
import types

import next_tokens
import pytest
from reference import import_reference
from tiny import MAX_SEQ_LENGTH, write_data

from bert_packed.core.settings import InputError
from bert_packed.records import inputs
from bert_packed.records.provenance import MANIFEST_NAME

torch, _ = import_reference()

from bert_packed.torch import PackedDataset  # noqa: E402  after the skip where torch is missing

NUM_PACKS = 15


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """Pattern of two files that hold 15 packs, each with other tokens."""
    folder = tmp_path_factory.mktemp("packs")
    write_data(folder)
    return str(folder / "packed-*.tfrecord")


@pytest.fixture
def as_worker(monkeypatch):
    """Read a dataset as one of several DataLoader workers would, without its process."""

    def become(number, count):
        worker = types.SimpleNamespace(id=number, num_workers=count)
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: worker)

    return become


def tokens_of(items):
    """The tokens of packs: list of tuples, which identify packs."""
    return [tuple(item["input_ids"].tolist()) for item in items]


def read(packs, epoch=0, **arguments):
    dataset = PackedDataset(packs, **arguments)
    dataset.set_epoch(epoch)
    return tokens_of(dataset)


EMPTY = (0,) * MAX_SEQ_LENGTH


def test_an_epoch_has_each_pack_once_in_another_order(packs):
    on_disk = read(packs, shuffle_buffer_size=1)
    assert len(set(on_disk)) == NUM_PACKS and EMPTY not in on_disk
    epochs = [read(packs, epoch, seed=7, shuffle_buffer_size=8) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(on_disk) and epoch != on_disk
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[1] == read(packs, 1, seed=7, shuffle_buffer_size=8)
    assert epochs[1] != read(packs, 1, seed=8, shuffle_buffer_size=8)


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 2), (2, 3), (16, 1), (3, 7)])
def test_ranks_and_workers_share_an_epoch(packs, as_worker, world_size, num_workers):
    whole = read(packs, 2, shuffle_buffer_size=8)
    parts = []
    for rank in range(world_size):
        parts.append([])
        for worker in range(num_workers):
            as_worker(worker, num_workers)
            parts[-1].append(read(packs, 2, shuffle_buffer_size=8, rank=rank, world_size=world_size))
    # No rank waits for another: worker by worker they have equally many
    counts = [[len(part) for part in by_worker] for by_worker in parts]
    assert all(count == counts[0] for count in counts)
    assert sum(counts[0]) == -(-NUM_PACKS // world_size)
    for rank, by_worker in enumerate(parts):
        mine = [one for turn in itertools.zip_longest(*by_worker) for one in turn if one]
        filled = whole[rank::world_size]
        assert mine == filled + [EMPTY] * (len(mine) - len(filled))


def test_packs_of_masked_tokens_alone_have_no_next_sentences(tmp_path):
    """The manifest beside each file decides: packs for both objectives, read with them, keep theirs."""
    for name, manifest in (("both", {}), ("mlm", {"objective": "mlm"})):
        (tmp_path / name).mkdir()
        write_data(tmp_path / name)
        (tmp_path / name / MANIFEST_NAME).write_text(json.dumps(manifest))
    items = list(PackedDataset(f"{tmp_path}/*/packed-*.tfrecord", shuffle_buffer_size=1))
    ignored = [bool((item["next_sentence_labels"] == -100).all()) for item in items]
    assert ignored == [False] * NUM_PACKS + [True] * NUM_PACKS
    assert {label for item in items[:NUM_PACKS] for label in item["next_sentence_labels"].tolist()} == {0, 1}


def test_the_mask_is_of_each_sequence_alone(packs):
    for item in itertools.islice(PackedDataset(packs), 4):
        owners, mask = item["sequence_ids"].tolist(), item["attention_mask"]
        assert mask.shape == (1, MAX_SEQ_LENGTH, MAX_SEQ_LENGTH) and mask.dtype == torch.float32
        for query, key in itertools.product(range(MAX_SEQ_LENGTH), repeat=2):
            assert (mask[0, query, key] == 0) == (owners[query] == owners[key])
    assert "attention_mask" not in next(iter(PackedDataset(packs, mask_dtype=None)))
    half = next(iter(PackedDataset(packs, mask_dtype=torch.bfloat16)))["attention_mask"]
    assert half.dtype == torch.bfloat16 and half.min() == torch.finfo(torch.bfloat16).min


@pytest.mark.parametrize(("rank", "world_size", "worker", "num_workers"), [(0, 1, 0, 1), (1, 2, 1, 3)])
def test_iteration_resumes_at_any_pack(packs, as_worker, rank, world_size, worker, num_workers):
    as_worker(worker, num_workers)
    arguments = {"seed": 3, "shuffle_buffer_size": 4, "rank": rank, "world_size": world_size}
    whole = read(packs, 5, **arguments)
    for num_read in range(len(whole) + 1):
        stopped = PackedDataset(packs, **arguments)
        stopped.set_epoch(5)
        items = iter(stopped)
        first = tokens_of(itertools.islice(items, num_read))
        state = json.loads(json.dumps(stopped.state_dict()))
        again = PackedDataset(packs, **arguments)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert first + tokens_of(again) == whole
        # The next epoch is whole, by either way to it
        again.set_epoch(6)
        assert again.state_dict()["num_read"] == 0
        assert tokens_of(again) == read(packs, 6, **arguments)
        again.load_state_dict(state)
        again.set_epoch(6)
        assert tokens_of(again) == read(packs, 6, **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "`seed` must be 3, as when the state was made. Received: 4."),
        ({"shuffle_buffer_size": 9}, "`shuffle_buffer_size` must be 4, as when"),
        ({"rank": 0, "world_size": 2}, "`world_size` must be 1, as when"),
        ({}, "`num_workers` must be 1, as when the state was made"),
    ],
)
def test_a_state_of_another_order_is_refused(packs, as_worker, change, message):
    state = PackedDataset(packs, seed=3, shuffle_buffer_size=4).state_dict()
    if not change:
        as_worker(0, 2)
    other = PackedDataset(packs, **{"seed": 3, "shuffle_buffer_size": 4, **change})
    other.load_state_dict(state)
    with pytest.raises(InputError) as found:
        iter(other)
    assert message in str(found.value)


def test_files_are_read_whole_once(packs, tmp_path, monkeypatch):
    index_file = str(tmp_path / "packs.index")
    whole = tokens_of(PackedDataset(packs, index_file=index_file))
    monkeypatch.setattr(inputs, "scan_file", lambda path: pytest.fail(f"{path} is read again"))
    assert tokens_of(PackedDataset(packs, index_file=index_file)) == whole


def test_a_damaged_file_is_named(tmp_path):
    files = write_data(tmp_path)
    dataset = PackedDataset(",".join(files))
    promise = {"files": [{"name": "packed-1.tfrecord", "num_records": 4, "sha256": "0" * 64}]}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(promise))
    with pytest.raises(InputError, match=rf"{files[1]} must hold 4 records, as the manifest\.json beside it"):
        PackedDataset(files[1])
    with open(files[1], "r+b") as file:
        file.truncate(inputs.scan_file(files[1]).offsets[-2])
    with pytest.raises(InputError, match=rf"{files[1]} must stay as it is .* a shorter file"):
        list(dataset)


def test_mistakes(packs, tmp_path):
    causal = tmp_path / "causal.tfrecord"
    next_tokens.write_packs(causal, next_tokens.batch_of(next_tokens.random_packs(), 12, 4))
    for arguments, message in (
        ({"input_file": str(tmp_path / "none*")}, "`input_file` must match at least one file"),
        ({"input_file": str(causal)}, "`input_file` must hold packs for mlm_nsp. Received: "),
        ({"rank": 1}, "`rank` and `world_size` must be given together. Received: 1 and None."),
        ({"rank": 2, "world_size": 2}, "`rank` must be a whole number from 0 to 1. Received: 2."),
        ({"rank": "0", "world_size": 2}, "`rank` must be a whole number from 0 to 1. Received: '0'."),
        ({"shuffle_buffer_size": 0}, "`shuffle_buffer_size` must be a whole number from 1. Received: 0."),
        ({"seed": -1}, "`seed` must be a whole number from 0 to 9,223,372,036,854,775,807. Received: -1."),
    ):
        with pytest.raises(ValueError) as found:
            PackedDataset(**{"input_file": packs, **arguments})
        assert message in str(found.value)


def test_rank_is_that_of_torch_distributed(packs, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    found = tokens_of(PackedDataset(packs))
    monkeypatch.undo()
    assert found == read(packs, rank=1, world_size=4)


def test_torch_alone_is_imported(packs):
    program = """
import sys, types
from bert_packed.torch import PackedDataset, PackingCollator
list(PackedDataset(sys.argv[1]))
tokenizer = types.SimpleNamespace(pad_token_id=0)
PackingCollator(tokenizer, 6, mlm_probability=None)([{"input_ids": [5, 6]}, {"input_ids": [7]}])
others = {"tensorflow", "keras", "jax", "transformers"}
print(sorted({name.partition(".")[0] for name in sys.modules} & others))
"""
    found = subprocess.run([sys.executable, "-c", program, packs], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")  # on one CPU
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stateful_data_loader_resumes(packs, num_workers):
    """torchdata's own loader, in the middle of an epoch and into another."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install -e '.[torch]'")

    def make_loader():
        dataset = PackedDataset(packs, seed=1, shuffle_buffer_size=8)
        options = {"num_workers": num_workers}
        if num_workers:
            options |= {"multiprocessing_context": "spawn", "persistent_workers": True}
        return torchdata.StatefulDataLoader(dataset, batch_size=2, **options)

    loader, epochs = make_loader(), []
    for epoch in range(2):
        loader.dataset.set_epoch(epoch)
        epochs.append([])
        for number, batch in enumerate(loader):
            epochs[-1].append(batch["input_ids"].tolist())
            if number == 2:
                state = loader.state_dict()
    assert epochs[0] != epochs[1]
    again = make_loader()
    again.load_state_dict(state)
    again.dataset.set_epoch(1)
    assert [batch["input_ids"].tolist() for batch in again] == epochs[1][3:]
    again.dataset.set_epoch(0)
    assert [batch["input_ids"].tolist() for batch in again] == epochs[0]
