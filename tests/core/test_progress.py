"""The bar moves within a step, by no more and no less than the step's size, and only on a terminal."""

import time

import numpy as np
import pytest

from bert_packed.core import progress
from data_gen.jobs import steps
from data_gen.jobs.steps import Job, Step

S = 16


class Bar:
    """A replacement for tqdm that remembers when it moved and by how much."""

    def __init__(self, total=0, **_):
        self.total, self.moves = total, []
        Bar.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None

    def update(self, amount):
        if amount:
            self.moves.append((time.monotonic(), amount))

    @property
    def shown(self):
        return sum(amount for _, amount in self.moves)


@pytest.fixture
def bars(monkeypatch):
    Bar.made = []
    monkeypatch.setattr(steps, "tqdm", Bar)
    return Bar.made


def work_slowly(number):
    for _ in range(8):
        time.sleep(0.1)
        progress.advance(10)
    return time.monotonic()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_bar_moves_before_a_step_ends(tmp_path, bars, num_workers, monkeypatch):
    monkeypatch.setattr(steps, "SECONDS_BETWEEN_LOOKS", 0.05)
    with Job(tmp_path, num_workers) as job:
        ends = job.run([Step(f"slow-{number}", work_slowly, number, 100) for number in range(2)], "slow")
        (bar,) = bars
        early = sum(amount for moment, amount in bar.moves if moment < min(ends))
        assert 20 <= early <= 160  # of 80 or 160 that were reported by then
        assert bar.shown == bar.total == 200
        # what is done already counts at once, and nothing twice
        job.run([Step(f"slow-{number}", work_slowly, number, 100) for number in range(2)], "slow")
        assert [amount for _, amount in bars[1].moves] == [100, 100]


def test_without_a_terminal_there_is_no_bar(tmp_path, capsys):
    with Job(tmp_path, 1) as job:
        job.run([Step("quick", time.sleep, 0, 100)], "quick")
    assert capsys.readouterr().err == ""


def test_a_step_counts_its_size_whatever_it_reports(monkeypatch):
    """A step that fails counts what it reported."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN", 0)
    for reported in ([], [3, 4], [30, 4]):
        found = []
        with progress.following(found.append), progress.step(10):
            for amount in reported:
                progress.advance(amount)
        assert sum(found) == 10
    progress.advance(5)  # outside of a step, and with nobody to tell
    with progress.following(found.append):
        progress.advance(5)
    assert sum(found) == 10
    found = []
    with pytest.raises(KeyError), progress.following(found.append), progress.step(10):
        progress.advance(3)
        raise KeyError
    assert found == [3]


def test_reading_and_writing_move_the_bar_within_a_file(tmp_path, bars, monkeypatch):
    # workers that look for `work_slowly` import this file, and an import of TensorFlow takes seconds
    from unpacked_records import make_features, write_features

    from bert_packed.records import tfrecords
    from data_gen import pack_job, pack_steps
    from data_gen.pack_config import PackConfig
    from data_gen.text import create_job, create_steps
    from data_gen.text.create_config import CreateConfig

    monkeypatch.setattr(progress, "SECONDS_BETWEEN", 0)
    monkeypatch.setattr(pack_steps, "PACKS_AT_ONCE", 50)
    monkeypatch.setattr(create_steps, "PAIRS_AT_ONCE", 50)
    monkeypatch.setattr(tfrecords, "READ_BATCH", 100)
    lengths = np.random.default_rng(0).integers(3, S + 1, 500)
    write_features(tmp_path / "a.tfrecord", make_features(lengths, S))
    common = {"max_seq_length": S, "num_shards": 1, "num_workers": 1}
    pack_job.pack(PackConfig(f"{tmp_path}/a.tfrecord", output_dir=f"{tmp_path}/packs", **common))
    (tmp_path / "a.txt").write_text("one two three\nfour five\n\n" * 2000)
    create_job.create(CreateConfig(f"{tmp_path}/a.txt", f"{tmp_path}/out", vocab_size=60, **common))
    read, _, _, _, write, train, tokenize, _, make = bars
    for bar in (read, write, train, tokenize, make):
        assert len(bar.moves) >= 4
        # the last move, with which the step ends, is for what is left: most was reported before
        assert bar.shown - bar.moves[-1][1] >= 0.7 * bar.total
    assert all(bar.shown == bar.total for bar in bars)
    assert read.total == (tmp_path / "a.tfrecord").stat().st_size
