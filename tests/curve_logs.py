"""Runs of learning curves and their logs, as tests write them."""

from benchmarks.planned_runs import Run


def a_run(variant="packed", seed=1, num_steps=3, per_step=10.0, more_flags=""):
    """A `planned_runs.Run` of few steps."""
    flags = {"input_file": "p", "num_train_steps": num_steps, "num_warmup_steps": 1, "random_seed": seed}
    return Run(variant, seed, flags, per_step, more_flags)


def write_log(path, rows):
    """Write the log of a run: its folder too, where it is missing."""
    path.parent.mkdir(exist_ok=True)
    columns = ("step", "loss", "mlm_loss", "mlm_accuracy", "sequences_per_second")
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
