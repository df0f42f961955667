"""The optimizer's state of an earlier run as the start of another: `--keep_optimizer_state`.

The moments are kept unchanged. Their correction for a zero start needs the number of steps behind them, so
the optimizer counts on, and the learning rate's schedule begins at that step:

    phase 1, steps of the optimizer     0 1 2 3
    phase 2                                     4 5 6 7
             steps of the run                   0 1 2 3
"""

from safetensors import SafetensorError, safe_open

from bert_packed.checkpoints import checkpoint
from bert_packed.core.settings import InputError

STEP_COUNT = "/iteration"  # Keras's name of it, below the optimizer's


def steps_before(latest, init_checkpoint):
    """Number of steps that a run's optimizer counted in earlier runs.

    `latest` is the checkpoint of the run to continue from, or None where it starts from `init_checkpoint`.
    """
    path = (latest or checkpoint.find_checkpoint(init_checkpoint)) / checkpoint.TRAINING
    try:
        with safe_open(path, "numpy") as file:
            names = [name for name in file.keys() if name.endswith(STEP_COUNT)]  # noqa: SIM118
            counts = [int(file.get_tensor(name)) for name in names]
    except (SafetensorError, FileNotFoundError) as error:
        raise InputError(f"{path} must hold an optimizer's state. Received: {error}.") from error
    if len(counts) != 1:
        raise InputError(f"{path} must hold the state of one optimizer. Received: {len(counts)}.")
    return counts[0] - (checkpoint.step_of(latest) if latest else 0)


def load(init_checkpoint, engine):
    """Give an engine the moments of another run's optimizer, and its count of steps.

    Raises `InputError` for a missing or damaged file, another optimizer or another model; the engine is then
    as it was.
    """
    folder = checkpoint.find_checkpoint(init_checkpoint)
    checkpoint.check_checksums(folder, (checkpoint.TRAINING,), others=False)
    path, kind = folder / checkpoint.TRAINING, engine.optimizer.name
    stored = checkpoint.read_tensors(path)
    kinds = sorted(name.removesuffix(STEP_COUNT) for name in stored if name.endswith(STEP_COUNT))
    if kinds != [kind]:
        raise InputError(
            f"{path} must hold the moments of this run's `optimizer`, {kind}. Received: {', '.join(kinds)}."
        )
    # Without dropout's seeds, which the new run draws from its own `random_seed`
    moments, state = (
        {name: values for name, values in found.items() if name.startswith(f"{kind}/")}
        for found in (stored, engine.training_state())
    )
    checkpoint.assign_tensors(path, moments, state)
