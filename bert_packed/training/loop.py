"""The training loop on the host: data, progress, logs, evaluation, checkpoints and stopping."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

from bert_packed.core.progress import describe_duration
from bert_packed.core.settings import InputError
from bert_packed.objectives.objective import add_sums
from bert_packed.training.backend import Profile
from bert_packed.training.metrics_log import LogInterval, Scale, describe, is_due
from bert_packed.training.nonfinite import NotFiniteError, SkippedSteps, check_sums
from bert_packed.training.stop_request import StopRequest


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Callbacks and settings of `train`.

    Attributes:
        batches: Function from the number of steps taken to a `ReadAhead` of the next batches.
        log: Function of a row of training figures.
        show: Function of a line for people about that row.
        evaluate: Function of a step that returns True to end the run; None for no evaluation.
        save: Function of a step and the loop's own state, plain JSON.
        prune: Function that removes older checkpoints, called once the last one has given finite sums.
        learning_rate: Function from a step's index, from 0, to its rate.
        means: Function from sums over steps to the figures of a row.
        tell_skipped: Function of a skipped step, its figures that are not finite, as text, and the sources of
            its batch.
        shows_progress: True for a progress bar where stderr is a terminal.
        num_processes: Number of processes of the run, which stop together.
        export: Function of a step; None for no export.
    """

    batches: Callable[[int], Iterator]
    log: Callable[[dict], None]
    evaluate: Callable[[int], bool | None] | None
    save: Callable[[int, dict], None]
    prune: Callable[[], None]
    learning_rate: Callable[[int], float]
    means: Callable[[dict], dict]
    tell_skipped: Callable[[int, str, dict | None], None]
    show: Callable[[str], None] = lambda _: None
    shows_progress: bool = True
    num_processes: int = 1
    scale: Scale = dataclasses.field(default_factory=Scale)
    profile: Profile = dataclasses.field(default_factory=Profile)
    export: Callable[[int], None] | None = None


def train(engine, config, hooks, first_step=0, state=None):
    """Train from `first_step` to `config.num_train_steps`, or until SIGTERM or SIGINT.

    The device computes a step while the host reads the figures of the one before. It has nothing to do only
    where a hook needs the weights: before a checkpoint, an export or an evaluation.

    In the first step, which compiles, SIGTERM ends the process of a run that has no other one.

    Args:
        engine: `Engine`; with several processes its sums hold `num_stop_requests`.
        config: `PretrainingConfig`, or another object with its numbers of steps.
        hooks: `Hooks`.
        first_step: Number of steps taken before; the data continue there.
        state: The state that `hooks.save` got at that step; None at the start.

    Returns:
        The signal that stopped the run after a save, or None when the run is complete.

    Raises:
        NotFiniteError: `config.max_skipped_steps` steps in a row, or what would be saved, are not finite.
    """
    state = state or {"interval": {}, "evaluation_due": False}
    # Several processes end together, which takes a step
    stop = StopRequest(costs_nothing=hooks.num_processes == 1)
    with stop.watching(), _progress_bar(config, hooks, first_step) as bar, hooks.profile:
        is_due_now = bool(hooks.evaluate) and state["evaluation_due"]
        is_over = is_due_now and _evaluate_step(hooks, first_step)
        figures = _Figures(config, hooks, first_step, state, bar)
        if first_step < config.num_train_steps:
            if is_over:
                hooks.save(first_step, figures.state(evaluation_due=False))
            else:
                # For minutes a log file would show nothing, and the run would look as if it hung
                hooks.show("compiling  the step")
                with contextlib.closing(hooks.batches(first_step)) as batches:
                    if stopped_by := _take_steps(engine, config, hooks, first_step, batches, figures, stop):
                        return stopped_by
        hooks.prune()
    return None


def _take_steps(engine, config, hooks, first_step, batches, figures, stop):
    """Take all steps, or those until a signal or an evaluation ends the run: the signal, or None."""
    ahead = None  # the step that the device computes
    num_requests = None if hooks.num_processes == 1 else 0.0
    for step in range(first_step + 1, config.num_train_steps + 1):
        if ahead and not batches.is_ready():
            ahead.wait(engine)  # or its time would count as spent waiting for data
        start = time.perf_counter()
        with hooks.profile.step(step):
            try:
                batch = next(batches)
            except InputError:
                if ahead:  # its row is written, and if it is the last NaN allowed, that ends the run
                    figures.note(ahead, engine)
                raise
            waiting = time.perf_counter() - start
            taken = _Step(step, engine.start_step(batch, stop.signal is not None), waiting, batches.sources)
            if hooks.profile.ends_with(step):
                taken.wait(engine)
        if ahead:
            num_requests = figures.note(ahead, engine)
        ahead = taken
        exports = bool(hooks.export) and is_due(step, config.export_every, config)
        saves = is_due(step, config.save_checkpoints_steps, config)
        evaluates = bool(hooks.evaluate) and is_due(step, config.eval_steps, config)
        is_first = step == first_step + 1
        if not (is_first or exports or saves or evaluates or stop.agreed(num_requests)):
            continue
        num_requests, ahead = figures.note(ahead, engine), None
        engine.write_back()
        stop.costs_nothing = False
        stopped_by = stop.agreed(num_requests)
        is_last = step == config.num_train_steps
        if exports:
            # An export comes before the checkpoint: a kill in between repeats the step with its export
            hooks.export(step)
        # A checkpoint comes before its evaluation: neither bad held-out data nor a signal during a long one
        # costs a step. A run that continues here begins with the evaluation that is due
        if stopped_by or saves:
            hooks.save(step, figures.state(evaluates))
        if stopped_by and not is_last:
            return stopped_by
        if evaluates and _evaluate_step(hooks, step) and not is_last:
            hooks.save(step, figures.state(evaluation_due=False))
            break
        figures.restart_clock()
    return None


@dataclasses.dataclass
class _Step:
    """A step under way: its sums on the device, the seconds until there was a batch, the batch's sources."""

    number: int
    sums: dict
    waiting: float
    sources: object
    end: float | None = None

    def wait(self, engine):
        """Wait for the sums, as floats, and note the time."""
        if self.end is None:
            self.sums, self.end = engine.read(self.sums), time.perf_counter()


class _Figures:
    """The figures of steps as they end, in order: skipped steps, rows of the log, the time left."""

    def __init__(self, config, hooks, first_step, state, bar):
        self._config, self._hooks, self._first_step, self._bar = config, hooks, first_step, bar
        self._interval = LogInterval.from_state(state, hooks.scale)
        self._skipped = SkippedSteps(config.max_skipped_steps)
        self._is_unproven = True  # that the weights of the last checkpoint give finite sums
        self._first_end = None
        self.restart_clock()

    def restart_clock(self):
        """Begin the time of the next step now: what the device has waited for is in no step's time."""
        self._last_end = time.perf_counter()

    def state(self, evaluation_due):
        """The loop's state after the last step that was noted, to save it."""
        self._is_unproven = True
        return {**self._interval.state(), "evaluation_due": evaluation_due}

    def note(self, taken, engine):
        """Wait for a step and log it; returns the number of requests to stop, None from a lone process."""
        taken.wait(engine)
        step, sums, hooks, config = taken.number, taken.sums, self._hooks, self._config
        seconds, self._last_end = taken.end - self._last_end, taken.end
        num_requests = sums.pop("num_stop_requests", None)
        why = self._skipped.note(sums, sums.pop("is_skipped"))
        if why:
            hooks.tell_skipped(step, why, taken.sources)
            self._skipped.check(step, why)  # only now, or the records of the last would not be known
            self._interval.num_skipped += 1
        else:
            self._interval.add(sums, seconds if self._first_end else None, taken.waiting)
        if self._first_end is None:
            self._first_end = taken.end
            hooks.show(f"compiled   in {describe_duration(seconds)}, the first step included")
        if self._is_unproven and not why:
            # Older checkpoints go only now: weights that were finite when saved may still give NaN
            hooks.prune()
            self._is_unproven = False
        self._bar.update()
        if is_due(step, config.log_steps, config):
            row = self._interval.row(step, hooks.means, hooks.learning_rate(step - 1))
            hooks.log(row)
            # The clock counts evaluations, exports and checkpoints, but not the step that compiles
            num_timed, num_left = step - self._first_step - 1, config.num_train_steps - step
            seconds = time.perf_counter() - self._first_end
            line = describe(row, seconds / num_timed * num_left if num_timed else None)
            self._bar.set_postfix_str(line)
            hooks.show(f"step {step:,}/{config.num_train_steps:,}: {line}")
            self._interval = LogInterval(scale=hooks.scale)
        return num_requests


def evaluate(engine, batches, max_batches=0):
    """Sums over evaluation batches: dict of floats.

    Args:
        engine: Object with `eval_step(batch)`.
        batches: Iterable of batches.
        max_batches: Upper limit of batches taken; 0 takes all.

    Raises:
        NotFiniteError: a sum is not finite.
    """
    total = {}
    for number, batch in enumerate(batches, 1):
        total = add_sums(total, engine.eval_step(batch))
        if number == max_batches:
            break
    check_sums(total, "in evaluation")
    return total


def _evaluate_step(hooks, step):
    try:
        return hooks.evaluate(step)
    except NotFiniteError as error:
        raise NotFiniteError(str(error), step) from error


def _progress_bar(config, hooks, first_step):
    return tqdm(
        total=config.num_train_steps,
        initial=first_step,
        disable=None if hooks.shows_progress else True,
        # The bar and the line of the last row fit 100 columns
        bar_format="{l_bar}{bar:10}| {n_fmt}/{total_fmt}{postfix}",
    )
