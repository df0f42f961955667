"""Any command, killed at random moments again and again, against the same command left alone.

python -m benchmarks.soak --minutes=120 --output_dir=soak --compare='*.tfrecord,manifest.json' \\
    --command='bert-packed pack --input_file=in/*.tfrecord --output_dir={out} --max_seq_length=128'
"""

import contextlib
import dataclasses
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.runner import Settings, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting

KILLED = -signal.SIGKILL
MARGIN = 1.1  # of the time of a command left alone; a kill may come too late


@dataclasses.dataclass(frozen=True)
class SoakConfig(Settings):
    """Rounds of a command that is killed, with all its processes, at moments drawn from a seed, and started
    again until it ends by itself; then its files must be those of a run that nothing befell, byte by byte.

    The first kill of a round falls evenly into the time of such a run, the next into what may be left.
    """

    command: str = setting("", "to run; {out} in it is the folder that it writes", required=True)
    output_dir: str = setting("", "new folder for all that the rounds write and say", required=True)
    compare: str = setting("*", "patterns of the names of files to compare, with commas")
    minutes: float = setting(120.0, "no round begins after", minimum=0.0)
    kills: int = setting(5, "most kills in a round", minimum=1)
    seed: int = setting(0, "seed of the moments", minimum=0)


def main(config):
    """Measure, print and write."""
    folder, rng, start = Path(config.output_dir), random.Random(config.seed), time.monotonic()
    if folder.exists():
        raise InputError(f"`output_dir` must be new. Received: {folder}.")
    alone = run_once(config, folder, "alone")
    want, rows = read_files(folder / "alone", config.compare), []
    while not rows or time.monotonic() - start < 60 * config.minutes:
        rows.append(do_round(config, folder, f"round-{len(rows)}", rng, alone, want))
    num_kills = sum(row["kills"] for row in rows)
    lost = [(row["seconds"] - alone) / row["kills"] for row in rows if row["kills"]]
    total = {
        "rounds": len(rows),
        "kills": num_kills,
        "seconds alone": alone,
        "seconds lost per kill": statistics.median(lost) if lost else None,
        "rounds that differ": sum(not row["equal"] for row in rows),
    }
    show("soak", config, {"rounds": rows, "soak": [total]}, [f"{len(want)} files compared in each round."])


def do_round(config, folder, name, rng, alone, want):
    """Kill the command some times, then let it end: a row of the table."""
    seconds, kills = 0.0, 0
    for _ in range(config.kills):
        taken = run_once(config, folder, name, rng.uniform(0, max(MARGIN * alone - seconds, 0.1 * alone)))
        seconds += abs(taken)
        kills += taken < 0
        # It has ended by itself, or was killed when all was there, which some commands then refuse
        if taken > 0 or read_files(folder / name, config.compare) == want:
            break
    else:
        seconds += run_once(config, folder, name)
    return {
        "round": name,
        "kills": kills,
        "seconds": seconds,
        "equal": read_files(folder / name, config.compare) == want,
    }


def run_once(config, folder, name, moment=None):
    """Run the command, killed after so many seconds: the seconds that it took, negative if it was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [word.replace("{out}", str(folder / name)) for word in shlex.split(config.command)]
    start, said = time.monotonic(), folder / f"{name}.log"
    with said.open("a") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)
    try:
        status = process.wait(moment)
    except subprocess.TimeoutExpired:
        status = KILLED
    finally:  # workers that outlive their parent would write beside the next one
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - start
    if status not in (0, KILLED):
        raise InputError(f"`command` must end with status 0. Received: {status}; see {said}.")
    return seconds if status == 0 else -seconds


def read_files(folder, patterns):
    """Contents of the files below a folder that a pattern names, by path."""
    paths = {path for pattern in patterns.split(",") for path in folder.rglob(pattern) if path.is_file()}
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


if __name__ == "__main__":
    sys.exit(run(main, SoakConfig))
