"""The outer loop around a recorded engine: what it logs, saves, evaluates and stops, and when."""

import contextlib
import io
import math
import re
import signal

import pytest
from clock import Clock
from recorded_loop import Numbers, Recorder, train, without_times

from bert_packed.core.settings import InputError
from bert_packed.training import loop
from bert_packed.training.nonfinite import NotFiniteError


@pytest.fixture
def whole():
    recorder = Recorder()
    assert train(recorder) is None
    return recorder


def test_the_order_of_callbacks(whole):
    """A step is exported before it is saved: after a kill in between it would never be."""
    assert whole.names() == [
        *("batches 0", "train 1", "train 2", "export 2", "evaluate 2", "train 3", "train 4", "log 3"),
        *("export 4", "save 4", "evaluate 4", "train 5", "train 6", "log 6", "export 6"),
        *("evaluate 6", "train 7", "log 7", "export 7", "save 7", "evaluate 7"),
    ]
    assert whole.kept == [7]
    bare = Recorder()
    train(bare, hooks={"evaluate": None, "export": None})
    assert {name.split()[0] for name in bare.names()} == {"batches", "train", "log", "save"}
    assert [state["evaluation_due"] for state in bare.saved.values()] == [False, False]


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ({}, None),
        ({"signal_at": 3}, None),
        ({"fails_at": (2, 3, 4)}, NotFiniteError),
        ({"fails_evaluation": 4}, NotFiniteError),
    ],
    ids=["whole", "signal", "skipped steps", "evaluation"],
)
def test_batches_that_are_read_ahead_are_closed(ends, error):
    recorder = Recorder(**ends)
    with pytest.raises(error) if error else contextlib.nullcontext():
        train(recorder)
    assert recorder.numbers.is_closed


def test_a_step_is_read_while_the_next_one_computes():
    """The first, which compiles, and those whose weights a hook needs are waited for."""
    recorder = Recorder()
    train(recorder, num_train_steps=9, save_checkpoints_steps=4, eval_steps=0, export_every=0)
    assert recorder.read_at == {1: 1, 2: 3, 3: 4, 4: 4, 5: 6, 6: 7, 7: 8, 8: 8, 9: 9}
    assert [row["step"] for row in recorder.rows()] == [3, 6, 9]


def test_a_row_has_the_steps_since_the_last_and_its_own_rate(whole):
    # (1 + 2 + 3) / 6, (4 + 5 + 6) / 6, 7 / 2; the rate of a step is that of its index from 0
    packed = {"packing_efficiency": 0.8}
    assert without_times(whole.rows()) == [
        {"step": 3, "loss": 1.0, "skipped_steps": 0, "learning_rate": 0.2, "gradient_norm": 4.0, **packed},
        {"step": 6, "loss": 2.5, "skipped_steps": 0, "learning_rate": 0.5, "gradient_norm": 10.0, **packed},
        {"step": 7, "loss": 3.5, "skipped_steps": 0, "learning_rate": 0.6, "gradient_norm": 14.0, **packed},
    ]


def train_on_a_clock(monkeypatch, first_step=0, hooks=None):
    """Train to step 900, 30 seconds each, the first of the process ten times as long."""
    clock, recorder = Clock(), Recorder()
    monkeypatch.setattr(loop, "time", clock)
    own = recorder.start_step

    def start_step(batch, wants_stop):
        clock.sleep(300.0 if batch == first_step + 1 else 30.0)
        return own(batch, wants_stop)

    monkeypatch.setattr(recorder, "start_step", start_step)
    train(recorder, first_step, hooks=hooks, num_train_steps=900, log_steps=300)


@pytest.mark.parametrize("first_step", [0, 300, 599])
def test_a_line_of_each_row_says_where_the_run_is(monkeypatch, first_step):
    """Also of a run that goes on: neither the compiling step nor those before it say how long others take."""
    shown = []
    train_on_a_clock(monkeypatch, first_step, {"show": shown.append})
    before, after, *shown = shown  # else a log file would show nothing for minutes
    assert before.startswith("compiling  ") and after == "compiled   in 5 min, the first step included"
    # A row of one step alone has no timed one
    lines = {300: ", 5 h left", 600: ", 2.5 h left" if first_step < 599 else "", 900: ""}
    assert [line.partition(": ")[0] for line in shown] == [f"step {n}/900" for n in lines if n > first_step]
    assert [line.partition("tokens/s")[2] for line in shown] == [lines[n] for n in lines if n > first_step]
    assert shown[-1].startswith("step 900/900: loss 375.2, ")


def test_the_bar_of_a_terminal_fits_it(monkeypatch):
    written = io.StringIO()
    written.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", written)
    train_on_a_clock(monkeypatch)
    lines = [line for line in re.split(r"[\r\n]", written.getvalue()) if line.strip()]
    assert max(map(len, lines)) <= 100
    shown = r" 33%\|.{10}\| 300/900, loss 75\.25, \d+ tokens/s, 5 h left"
    assert any(re.fullmatch(shown, line.rstrip()) for line in lines), lines[-5:]


@pytest.mark.parametrize("first_step", [4, 7])
def test_a_resumed_run_goes_on_as_the_whole_one(whole, first_step):
    resumed = Recorder()
    assert train(resumed, first_step, whole.saved[first_step]) is None
    names = whole.names()
    after_save = names[names.index(f"save {first_step}") + 1 :]
    # the evaluation that was due comes first, before data are read
    assert resumed.names()[0] == after_save[0] == f"evaluate {first_step}"
    assert resumed.names()[2:] == after_save[1:]
    want = [row for row in without_times(whole.rows()) if row["step"] > first_step]
    assert without_times(resumed.rows()) == want
    assert {step: state for step, state in whole.saved.items() if step > first_step} == resumed.saved


def test_the_state_that_is_saved(whole):
    watched = {"gradient_norm": 8.0, "num_steps": 1.0, "num_tokens": 20.0}
    assert whole.saved == {
        # only step 4 is in no row yet
        4: {
            "interval": {"a_loss": 4.0, "num_sequences": 2.0, "num_tokens": 20.0},
            "num_skipped": 0,
            "watched": watched,
            "evaluation_due": True,
        },
        7: {"interval": {}, "num_skipped": 0, "watched": {}, "evaluation_due": True},
    }


def test_a_checkpoint_of_before_there_were_figures_to_watch(whole):
    """The row that its interval ends in has the figures of the steps taken since."""
    state = {name: value for name, value in whole.saved[4].items() if name != "watched"}
    resumed = Recorder()
    assert train(resumed, 4, state) is None
    first, second = without_times(resumed.rows())
    assert first == {**without_times(whole.rows())[1], "gradient_norm": 11.0}  # of steps 5 and 6
    assert second == without_times(whole.rows())[2]


def test_waiting_for_data_is_a_share_of_the_time(monkeypatch):
    clock = Clock()
    recorder = Recorder()
    monkeypatch.setattr(loop, "time", clock)
    wait, work = clock.taking([50, 1, 3]), clock.taking([70, 9, 7])
    own, start_step = Numbers.__next__, recorder.start_step
    monkeypatch.setattr(Numbers, "__next__", lambda numbers: (wait(), own(numbers))[1])
    recorder.start_step = lambda *arguments: (work(), start_step(*arguments))[1]
    train(recorder, num_train_steps=3)
    (row,) = recorder.rows()
    # 4 of 20 seconds are waiting; the first step, which compiles, does not count
    assert (row["data_wait_share"], row["tokens_per_second"]) == (0.2, 2.0)
    assert row["model_flop_utilisation"] is None  # of a model that nobody described


@pytest.mark.parametrize(("reads", "share"), [(3.0, 0.0), (13.0, 8.0 / 13)])
def test_waiting_while_the_device_computes_is_no_waiting(monkeypatch, reads, share):
    """A step of 5 seconds, and a batch after each 3 or 13."""
    clock, recorder = Clock(), Recorder()
    monkeypatch.setattr(loop, "time", clock)
    start_step, read, own = recorder.start_step, recorder.read, Numbers.__next__
    next_at, free_at = [0.0], {0: 0.0}

    def wait_until(moment):
        clock.now = max(clock.now, moment)

    def wait_and_get(numbers):
        wait_until(next_at[0])
        next_at[0] = clock.now + reads
        return own(numbers)

    def start(batch, wants_stop):
        free_at[batch] = max(clock.now, free_at[batch - 1]) + 5.0
        return start_step(batch, wants_stop)

    recorder.start_step = start
    recorder.read = lambda sums: (wait_until(free_at[sums["gradient_norm"] / 2]), read(sums))[1]
    monkeypatch.setattr(Numbers, "__next__", wait_and_get)
    monkeypatch.setattr(Numbers, "is_ready", lambda _: next_at[0] <= clock.now)
    train(recorder, log_steps=50, eval_steps=0, export_every=0, save_checkpoints_steps=50)
    (row,) = recorder.rows()
    assert row["data_wait_share"] == pytest.approx(share)
    assert row["tokens_per_second"] == pytest.approx(20 / max(reads, 5.0))


def test_a_signal_saves_the_step_under_way_and_stops(whole):
    recorder = Recorder(signal_at=5)
    assert train(recorder) == signal.SIGTERM
    assert recorder.names()[-2:] == ["train 5", "save 5"]
    resumed = Recorder()
    assert train(resumed, 5, recorder.saved[5]) is None
    assert without_times(resumed.rows()) == without_times(whole.rows())[1:]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_first_step_of_a_lone_process_may_be_lost(monkeypatch, num_processes):
    """Afterwards it would be taken again, and other processes would count this one as lost."""
    recorder, requests = Recorder(), []
    own, make = recorder.start_step, loop.StopRequest
    monkeypatch.setattr(loop, "StopRequest", lambda **of: requests.append(make(**of)) or requests[-1])
    costs = []
    recorder.start_step = lambda *arguments: (costs.append(requests[0].costs_nothing), own(*arguments))[1]
    train(recorder, 3, hooks={"num_processes": num_processes}, num_train_steps=6)
    assert costs == [num_processes == 1, False, False]


class OneOfSeveral(Recorder):
    """A process whose steps count who asks for a stop; another process asks from a step on."""

    def __init__(self, other_asks_at=99, **faults):
        super().__init__(**faults)
        self._other_asks_at = other_asks_at

    def start_step(self, batch, wants_stop):
        sums = super().start_step(batch, wants_stop)
        return {**sums, "num_stop_requests": float(wants_stop) + float(batch >= self._other_asks_at)}


def test_processes_stop_at_the_step_that_counts_a_request(whole):
    """One gets the signal in step 4, and says so in step 5; both read that while they compute step 6."""
    asks, hears = OneOfSeveral(signal_at=4), OneOfSeveral(other_asks_at=5)
    for process in (asks, hears):
        assert train(process, save_checkpoints_steps=100, eval_steps=0, export_every=0) == signal.SIGTERM
        assert process.names()[-3:] == ["train 6", "log 6", "save 6"]
    assert asks.saved == hears.saved
    resumed = OneOfSeveral()
    assert train(resumed, 6, asks.saved[6]) is None
    assert without_times(resumed.rows()) == without_times(whole.rows())[2:]


@pytest.mark.parametrize(
    "process",
    [
        Recorder(signal_at=7),
        OneOfSeveral(signal_at=7),
        OneOfSeveral(signal_at=6),
        OneOfSeveral(other_asks_at=7),
    ],
)
def test_a_request_that_comes_with_the_last_step_stops_nobody(whole, process):
    assert train(process) is None
    assert process.names() == whole.names()


@pytest.mark.parametrize("fails_at, message, last", [([], "record 4", "log 3"), ([3], "at step 3", "skip 3")])
def test_an_unreadable_batch_hides_nothing_of_the_step_before(fails_at, message, last):
    class Damaged(Numbers):
        def __next__(self):
            if self.sources == 3:
                raise InputError("record 4 is damaged")
            return super().__next__()

    recorder = Recorder(fails_at)
    with pytest.raises(InputError, match=message):
        train(recorder, hooks={"batches": Damaged}, max_skipped_steps=1)
    assert recorder.names()[-1].startswith(last)


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_step_that_is_no_number_ends_a_strict_run_unsaved(step):
    recorder = Recorder(fails_at=[step])
    with pytest.raises(InputError, match=f"Received: a_loss nan at step {step}"):
        train(recorder, max_skipped_steps=1)
    # The next one is under way by then, unless the weights of this one were to be exported
    last = {2: "train 2", 3: "train 4", 4: "log 3"}[step]
    assert recorder.names()[-2:] == [last, f"skip {step}: a_loss nan of {step}"] and not recorder.kept


def skipped_rows(recorder):
    return [(row["step"], row["skipped_steps"], row.get("loss")) for row in recorder.rows()]


def test_steps_left_out_are_reported_and_in_no_mean():
    recorder = Recorder(fails_at=[2, 4, 5, 7])
    assert train(recorder) is None
    assert [value for name, value in recorder.calls if name == "skip"] == [
        f"{step}: a_loss nan of {step}" for step in (2, 4, 5, 7)
    ]
    # The sums of a step are its number of two sequences
    rows = [(3, 1, (1 + 3) / 4), (6, 2, 6 / 2), (7, 1, None)]
    assert skipped_rows(recorder) == rows
    train(resumed := Recorder(fails_at=[5, 7]), 4, recorder.saved[4])
    assert skipped_rows(resumed) == rows[1:]


def test_too_many_in_a_row_end_the_run_and_name_the_weights():
    recorder = Recorder(fails_at=[2, 3, 5, 6, 7])
    with pytest.raises(
        NotFiniteError, match=r"at step 7, as at the 2 before it \(`max_skipped_steps`=3\)"
    ) as raised:
        train(recorder, num_train_steps=9)
    assert raised.value.weights_step == 4
    # The step that ends the run is reported as the others are
    assert recorder.names()[-2:] == ["train 8", "skip 7: a_loss nan of 7"] and recorder.kept == [4]


class Evaluated:
    def __init__(self, losses):
        self.losses, self.num_calls = losses, 0

    def eval_step(self, batch):
        self.num_calls += 1
        return {"a_loss": self.losses[batch], "num_sequences": 1.0}


def test_evaluation_adds_up_batches_up_to_a_number():
    for max_batches, want in ((0, 15.0), (2, 3.0), (9, 15.0)):
        engine = Evaluated([1.0, 2.0, 4.0, 8.0])
        assert loop.evaluate(engine, iter(range(4)), max_batches)["a_loss"] == want
        assert engine.num_calls == (2 if max_batches == 2 else 4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_evaluation_must_stay_finite(value):
    with pytest.raises(NotFiniteError, match=f"must stay finite. Received: a_loss {value} in evaluation"):
        loop.evaluate(Evaluated([1.0, value, 2.0]), range(3))


def test_a_checkpoint_stays_until_the_next_is_finite():
    """Weights that are finite and useless are saved; what was good before them is there, and is named."""
    for fault, weights_step, kept in (
        ({"fails_at": [9, 10, 11]}, 8, [4, 8]),
        ({"fails_evaluation": 8}, 8, [4, 8]),
        ({"fails_at": [10]}, 9, [8]),
        ({"fails_at": [5]}, 4, [4]),
    ):
        run = Recorder(**fault)
        with pytest.raises(NotFiniteError) as raised:
            train(run, num_train_steps=11, max_skipped_steps=len(fault.get("fails_at", "1")))
        assert (raised.value.weights_step, run.kept) == (weights_step, kept)
    run = Recorder()
    train(run, num_train_steps=11)
    assert run.kept == [11]
