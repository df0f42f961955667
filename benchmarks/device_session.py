"""All that an hour on a borrowed accelerator is for: the project's own commands, one after the other.

python -m benchmarks.device_session --text=my_text.txt --labels=topics --pairs=STS-B --output_dir=session
"""

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.runner import Settings, parse_names, show
from bert_packed.core.command_line import run
from bert_packed.core.progress import count_of
from bert_packed.core.settings import InputError, setting

# Models and settings of a session, and the smallest, to try it on a CPU
FULL = {"bert": "bert-base", "modernbert": "modernbert-base", "mamba": "mamba-110m", "mamba2": "mamba2-130m"}
TOY = {"bert": "bert-tiny", "modernbert": "modernbert-tiny", "mamba": "mamba-tiny", "mamba2": "mamba2-tiny"}
TOY_STEPS = ["--max_seq_length=64", "--batch_size=2", "--repeats=1"]
GRACE_SECONDS = 10
PARTS = ("steps", "killed", "bert", "modernbert", "classify", "embed", "others")


def commands(config, folder):
    """The command of each part, the dearest questions first: dict from `PARTS` to arguments of Python."""
    sizes, steps = (TOY, TOY_STEPS) if config.toy else (FULL, [])
    epochs = f"--num_train_epochs={0.1 if config.toy else 1}"

    def accelerator(name, *arguments):
        return ["benchmarks.accelerator", *arguments, *steps, f"--json={folder}/{name}.json"]

    def train(model, output_dir):
        arguments = [config.text, f"--output_dir={output_dir}", f"--bert_config_file={sizes[model]}", epochs]
        return ["bert_packed", "train", *arguments]

    def finetune(command, files, kind):
        inputs = [f"--train_file={files}/train.{kind}", f"--eval_file={files}/dev.{kind}"]
        start = f"--init_checkpoint={folder}/bert/run"
        return ["bert_packed", command, *inputs, start, epochs, f"--output_dir={folder}/{command}"]

    killed = shlex.join([sys.executable, "-m", *train("bert", "{out}")])
    others = ",".join(sizes[name] for name in ("modernbert", "mamba", "mamba2"))
    return {
        "steps": accelerator("steps", f"--models={sizes['bert']}"),
        # Killed at a random moment, and continued to the weights of a run that was left alone
        "killed": [
            *("benchmarks.soak", "--minutes=0", "--kills=1", "--compare=model.safetensors"),
            *(f"--output_dir={folder}/soak", f"--json={folder}/soak.json", f"--command={killed}"),
        ],
        "bert": train("bert", folder / "bert"),
        "modernbert": train("modernbert", folder / "modernbert"),
        "classify": finetune("classify", config.labels, "csv"),
        "embed": finetune("embed", config.pairs, "tsv"),
        "others": accelerator("others", f"--models={others}", "--parts=exactness,steps"),
    }


@dataclasses.dataclass(frozen=True)
class SessionConfig(Settings):
    """Runs steps of a BERT beside their peers; its training from text, killed and continued; that of a
    ModernBERT; labels and vectors from the BERT; exactness and steps of the other architectures.

    Each part is a command, and writes what it says to a file of its name. Parts begin while there is time.
    """

    text: str = setting("", "file of text, as `bert-packed train` reads it", required=True)
    labels: str = setting("", "folder of train.csv and dev.csv, as wikipedia_topics writes", required=True)
    pairs: str = setting("", "folder of train.tsv and dev.tsv of GLUE's STS-B", required=True)
    output_dir: str = setting("", "new folder", required=True)
    minutes: float = setting(60.0, "time limit: a part that it ends is stopped", minimum=0.0)
    parts: str = setting(
        ",".join(PARTS), "what to run, with commas", parse=lambda text: parse_names(text, PARTS)
    )
    toy: bool = setting(False, "the smallest models, to try the session on a CPU")


def main(config):
    """Run, print and write; returns the exit status."""
    folder, end = Path(config.output_dir).absolute(), time.monotonic() + 60 * config.minutes
    if folder.exists():
        raise InputError(f"`output_dir` must be new. Received: {folder}.")
    folder.mkdir(parents=True)
    rows, words = [], commands(config, folder)
    for part in config.parts.split(","):
        start, said = time.monotonic(), folder / f"{part}.log"
        status = run_part(words[part], said, end - start)
        last = said.read_text().strip().rpartition("\n")[2] if said.exists() else ""
        seconds = time.monotonic() - start
        rows.append({"part": part, "status": status, "seconds": seconds, "last line": last[-80:]})
        print(f"{part}: {status}", flush=True)
    num_failed = sum(row["status"] != "0" for row in rows)
    show("device_session", config, {"parts": rows}, [f"{count_of(num_failed, 'part')} not passed."])
    return int(num_failed > 0)


def run_part(words, said, seconds):
    """Run a module of Python under JAX, no longer than some seconds: its exit status, or what ended it."""
    if seconds <= 0:
        return "left out"
    command, environment = [sys.executable, "-m", *words], {**os.environ, "KERAS_BACKEND": "jax"}
    with said.open("w") as file:
        try:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, start_new_session=True
            )
            return str(process.wait(seconds))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
            process.send_signal(signal.SIGINT)  # so that soak ends what it runs, which is not of this group
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            if isinstance(stop, KeyboardInterrupt):
                raise
            return "out of time"
        finally:  # or workers would go on, and hold the device
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(run(main, SessionConfig))
