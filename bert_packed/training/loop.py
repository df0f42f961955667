"""The training loop on the host: data, progress, logs, evaluation, checkpoints and stopping."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable

from tqdm import tqdm

from bert_packed.core.progress import describe_duration
from bert_packed.objectives.objective import add_sums
from bert_packed.training.backend import Profile
from bert_packed.training.metrics_log import LogInterval, Scale, describe, is_due
from bert_packed.training.nonfinite import NotFiniteError, SkippedSteps, check_sums
from bert_packed.training.stop_request import StopRequest


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Callbacks and settings of `train`.

    Attributes:
        batches: Function from the number of steps taken to an endless iterable of the next batches. One that
            reads ahead has `close`, which is called at the end.
        log: Function of a row of training figures.
        show: Function of a line for people about that row.
        evaluate: Function of a step that returns True to end the run; None for no evaluation.
        save: Function of a step and the loop's own state, plain JSON.
        prune: Function that removes older checkpoints, called once the last one has given finite sums.
        learning_rate: Function from a step's index, from 0, to its rate.
        means: Function from sums over steps to the figures of a row.
        tell_skipped: Function of a skipped step and its figures that are not finite, as text.
        shows_progress: True for a progress bar where stderr is a terminal.
        num_processes: Number of processes of the run, which stop together.
        export: Function of a step; None for no export.
    """

    batches: Callable[[int], Iterable]
    log: Callable[[dict], None]
    evaluate: Callable[[int], bool | None] | None
    save: Callable[[int, dict], None]
    prune: Callable[[], None]
    learning_rate: Callable[[int], float]
    means: Callable[[dict], dict]
    tell_skipped: Callable[[int, str], None]
    show: Callable[[str], None] = lambda _: None
    shows_progress: bool = True
    num_processes: int = 1
    scale: Scale = dataclasses.field(default_factory=Scale)
    profile: Profile = dataclasses.field(default_factory=Profile)
    export: Callable[[int], None] | None = None


def train(engine, config, hooks, first_step=0, state=None):
    """Train from `first_step` to `config.num_train_steps`, or until SIGTERM or SIGINT.

    In the first step, which compiles, SIGTERM ends the process of a run that has no other one.

    Args:
        engine: Object with `train_step(batch, wants_stop)`; with several processes its sums hold
            `num_stop_requests`.
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
    interval = LogInterval.from_state(state, hooks.scale)
    skipped = SkippedSteps(config.max_skipped_steps)
    is_first = is_unproven = True
    # Several processes end together, which takes a step
    stop = StopRequest(costs_nothing=hooks.num_processes == 1)
    with (
        stop.watching(),
        _progress_bar(config, hooks, first_step) as bar,
        hooks.profile,
        contextlib.ExitStack() as stack,
    ):
        is_due_now = bool(hooks.evaluate) and state["evaluation_due"]
        is_over = is_due_now and _evaluate_step(hooks, first_step)
        if is_over and first_step < config.num_train_steps:
            hooks.save(first_step, {**interval.state(), "evaluation_due": False})
        goes_on = first_step < config.num_train_steps and not is_over
        batches = iter(hooks.batches(first_step) if goes_on else ())
        if hasattr(batches, "close"):
            stack.enter_context(contextlib.closing(batches))
        if goes_on:  # for minutes a log file would show nothing, and the run would look as if it hung
            hooks.show("compiling  the step")
        for step in range(first_step + 1, config.num_train_steps + 1) if goes_on else ():
            start = time.perf_counter()
            with hooks.profile.step(step):
                batch = next(batches)
                waiting = time.perf_counter() - start
                sums = engine.train_step(batch, stop.signal is not None)
                sums = {name: float(value) for name, value in sums.items()}
            stop.costs_nothing = False
            stopped_by = stop.agreed(sums.pop("num_stop_requests", None))
            why = skipped.note(sums, sums.pop("is_skipped"))
            if why:
                hooks.tell_skipped(step, why)
                skipped.check(step, why)  # only now, or the records of the last would not be known
                interval.num_skipped += 1
            else:
                interval.add(sums, None if is_first else time.perf_counter() - start, waiting)
            if is_first:
                is_first, first_end = False, time.perf_counter()
                hooks.show(f"compiled   in {describe_duration(first_end - start)}, the first step included")
            if is_unproven and not why:
                # Older checkpoints go only now: weights that were finite when saved may still give NaN
                hooks.prune()
                is_unproven = False
            bar.update()
            is_last = step == config.num_train_steps
            if is_due(step, config.log_steps, config):
                row = interval.row(step, hooks.means, hooks.learning_rate(step - 1))
                hooks.log(row)
                # The clock counts evaluations, exports and checkpoints, but not the step that compiles
                num_timed, num_left = step - first_step - 1, config.num_train_steps - step
                seconds = time.perf_counter() - first_end
                line = describe(row, seconds / num_timed * num_left if num_timed else None)
                bar.set_postfix_str(line)
                hooks.show(f"step {step:,}/{config.num_train_steps:,}: {line}")
                interval = LogInterval(scale=hooks.scale)
            if hooks.export and is_due(step, config.export_every, config):
                # An export comes before the checkpoint: a kill in between repeats the step with its export
                hooks.export(step)
            due = bool(hooks.evaluate) and is_due(step, config.eval_steps, config)
            # A checkpoint comes before its evaluation: neither bad held-out data nor a signal during a long
            # one costs a step. A run that continues here begins with the evaluation that is due
            if stopped_by or is_due(step, config.save_checkpoints_steps, config):
                hooks.save(step, {**interval.state(), "evaluation_due": due})
                is_unproven = True
            if stopped_by and not is_last:
                return stopped_by
            if due and _evaluate_step(hooks, step) and not is_last:
                hooks.save(step, {**interval.state(), "evaluation_due": False})
                break
        hooks.prune()
    return None


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
