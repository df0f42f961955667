"""A stream of packs has each row once an epoch, wherever it was stopped.

This file alone catches a row that is lost or repeated at a resume.
"""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from reference import import_trainer
from transformers_models import LENGTH, build, make_tokenizer, make_trainer, random_rows

torch, _, datasets = import_trainer()
torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install -e '.[torch]'")

from bert_packed.torch import PackedStream, PackingCollator, pack_dataset  # noqa: E402

NUM, BUFFER = 53, 8
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's
    pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes"),  # on one CPU
]


def make_rows():
    return random_rows(NUM, 1, 14)


def reverse(batch):
    """A function over batches, as tokenizers are given."""
    return {"input_ids": [row[::-1] for row in batch["input_ids"]]}


class Rows(torch.utils.data.IterableDataset):
    """Rows that divide themselves among workers, as torch asks of data sets."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(make_rows()[first::step])


def hub(num_shards=3):
    return datasets.Dataset.from_list(make_rows()).to_iterable_dataset(num_shards=num_shards)


SOURCES = {
    "datasets": hub,
    "by batches": lambda: hub().map(reverse, batched=True, batch_size=5),
    "shuffled shards": lambda: hub().shuffle(seed=1, buffer_size=1),
    "shuffled rows": lambda: hub().shuffle(seed=1, buffer_size=10).map(reverse, batched=True),
    "repeated": lambda: hub().map(reverse, batched=True, batch_size=5).repeat(2),
    "list": make_rows,
    "torch": Rows,
}


def make_loader(source, num_workers=0, batch_size=2, **options):
    stream = PackedStream(SOURCES[source](), LENGTH, buffer_size=BUFFER, **options)
    more = {"multiprocessing_context": "spawn", "persistent_workers": True} if num_workers else {}
    return torchdata.StatefulDataLoader(
        stream, batch_size=batch_size, num_workers=num_workers, collate_fn=list, **more
    )


def rows_of(batches):
    """The tokens of the sequences of batches of packs, in order."""
    found = []
    for pack in itertools.chain.from_iterable(batches):
        ids = np.asarray(pack["sequence_ids"])
        for number in range(1, ids.max() + 1):
            found.append(tuple(np.asarray(pack["input_ids"])[ids == number].tolist()))
    return found


def is_whole(batches, times=1):
    """Whether each row is there, possibly reversed."""
    wanted = sorted(tuple(sorted(row["input_ids"])) for row in make_rows() * times)
    return sorted(tuple(sorted(row)) for row in rows_of(batches)) == wanted


CASES = [(source, 0) for source in SOURCES]
CASES += [pytest.param("by batches", 2, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("source", "num_workers"), CASES)
def test_no_row_is_lost_or_repeated_at_a_resume(source, num_workers):
    """Stopped at some places of the second epoch of three, which are anywhere in a buffer."""
    loader, epochs, states = make_loader(source, num_workers), [], []
    for epoch in range(3):
        loader.dataset.set_epoch(epoch)
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch)
            if epoch == 1:
                states.append(loader.state_dict())
        assert is_whole(epochs[-1], 2 if source == "repeated" else 1)
    assert rows_of(epochs[0]) != rows_of(epochs[1])
    for place in [5] if num_workers else [*range(1, len(states), 4), len(states) - 1]:
        again = make_loader(source, num_workers)
        again.load_state_dict(states[place] if num_workers else json.loads(json.dumps(states[place])))
        assert rows_of(again) == rows_of(epochs[1][place + 1 :])
        again.dataset.set_epoch(2)
        assert rows_of(again) == rows_of(epochs[2])
        if place == 5:
            again.dataset.set_epoch(1)
            assert rows_of(again) == rows_of(epochs[1])


@pytest.mark.parametrize("source", SOURCES)
def test_workers_share_the_rows(source, monkeypatch):
    """Each resumes in its own share; their processes are in the test above."""
    found = []
    for number in range(3):
        worker = SimpleNamespace(id=number, num_workers=3)
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda worker=worker: worker)
        stream = PackedStream(SOURCES[source](), LENGTH, buffer_size=BUFFER)
        packs, states = [], []
        for pack in stream:
            packs.append(pack)
            states.append(stream.state_dict())
        again = PackedStream(SOURCES[source](), LENGTH, buffer_size=BUFFER)
        again.load_state_dict(states[-3])
        assert rows_of([again]) == rows_of([packs[-2:]])
        found.append(packs)
    assert is_whole(found, 2 if source == "repeated" else 1) and min(map(len, found)) > 4


@pytest.mark.parametrize("labels", [None, "sequence"])
def test_a_buffer_is_packed_as_a_data_set_is(labels):
    rows = make_rows()
    if labels:
        rows = [{**row, "labels": number} for number, row in enumerate(rows)]
    found = list(PackedStream(rows, LENGTH, 3, buffer_size=30, labels=labels, seed=5))
    wanted = [
        pack
        for part in (rows[:30], rows[30:])
        for pack in pack_dataset(datasets.Dataset.from_list(part), LENGTH, 3, labels=labels, seed=5)
    ]
    assert len(found) == len(wanted) < NUM / 2
    for got, want in zip(found, wanted, strict=True):
        assert got.keys() == want.keys()
        assert all(np.array_equal(got[name], want[name]) for name in want)
    batch = PackingCollator(make_tokenizer(), LENGTH, labels=labels)(found)
    assert (
        sorted(batch["labels"].tolist()) == list(range(NUM)) if labels else len(batch["labels"]) == len(found)
    )


def train(folder, resume=None):
    """Weights of a run of 20 steps, and the packs of its steps."""
    stream = PackedStream(SOURCES["repeated"](), LENGTH, buffer_size=BUFFER)
    collator, seen = PackingCollator(make_tokenizer(), LENGTH, seed=1), []
    settings = {"max_steps": 20, "save_strategy": "steps", "save_steps": 15}
    collate = lambda packs: seen.append(packs) or collator(packs)  # noqa: E731
    trainer = make_trainer(build("bert"), stream, collate, folder, 2, settings=settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.state_dict(), rows_of(seen[:20])


def test_trainer_resumes_a_stream(tmp_path):
    """In its second pass over the rows, to the weights of a run that was not stopped."""
    whole, seen = train(tmp_path)
    assert len(set(seen)) == NUM < len(seen)
    again, _ = train(tmp_path / "again", resume=str(tmp_path / "checkpoint-15"))
    for name, value in whole.items():
        assert torch.equal(again[name], value), name


def test_iterations_do_not_disturb_each_other():
    """A state is that of the newest, and each has all rows."""
    stream = PackedStream(make_rows(), LENGTH, buffer_size=BUFFER)
    one = iter(stream)
    packs = [next(one)]
    other = iter(stream)
    assert is_whole([[next(other), *other]])
    packs += one
    assert is_whole([packs])


def test_rows_in_another_order_do_not_continue():
    """As of a shuffle without a seed: rows were lost and repeated."""
    rows = make_rows()
    stream = PackedStream(rows, LENGTH, buffer_size=BUFFER)
    packs = iter(stream)
    next(packs)
    state = stream.state_dict()
    again = PackedStream(rows[1:] + rows[:1], LENGTH, buffer_size=BUFFER)
    again.load_state_dict(state)
    with pytest.raises(ValueError, match="`dataset` must have the rows that it had when the state was made"):
        next(iter(again))


def test_mistakes():
    rows = make_rows()
    for arguments, message in (
        (
            {"dataset": iter(rows)},
            "`dataset` must be an iterable, which begins again in each epoch. Received: ",
        ),
        ({"dataset": 3}, "`dataset` must be an iterable, which begins again in each epoch. Received: 3."),
        ({"buffer_size": 0}, "`buffer_size` must be a whole number from 1. Received: 0."),
        ({"labels": "x"}, "`labels` must be one of sequence, token. Received: 'x'."),
    ):
        with pytest.raises(ValueError) as found:
            PackedStream(**{"dataset": rows, "max_seq_length": LENGTH, **arguments})
        assert message in str(found.value)
    state = PackedStream(rows, LENGTH).state_dict()
    with pytest.raises(
        ValueError, match=r"`buffer_size` must be 10000, as when the state was made\. Received: 8"
    ):
        PackedStream(rows, LENGTH, buffer_size=8).load_state_dict(state)
