"""A training step in a process of its own, taken whenever it is told to: what `step_turns.py` times.

python -m bert_packed.runs.timed_step --flagfile=FILE

Not a command for people: it talks with the process that started it, a line of JSON for each line that it is
sent.
"""

import itertools
import json
import os
import sys
import time

from bert_packed.runs.pretraining_config import TrainConfig
from bert_packed.training.engines import choose_backend
from data_gen.cli.command_line import run

DESCRIPTION = """
Says on what it computes and, when its step is compiled, that it is ready; then takes a step for every line
on its standard input, and answers with the seconds.
"""


def main(config, steps=sys.stdin, answers=None):
    """Compile the step of a run and take it when told to, until `steps` ends.

    Args:
        config: `TrainConfig` of one device; its first records are the batch, again and again.
        steps: Iterable that has an item for every step to take.
        answers: Text stream; default standard output. A line of JSON each: `{"on_cpu": true}`, then
            `{"ready": true}`, then for every step `{"seconds": 0.5}`.
    """
    answers = answers or _keep_standard_output()

    def answer(**what):
        print(json.dumps(what), file=answers, flush=True)

    choose_backend()
    # TensorFlow and Keras: after the backend is chosen
    from bert_packed.config import ablate, load_model_config, override_dropout
    from bert_packed.data.input_pipeline import CheckedBatches, eval_batches
    from bert_packed.models.devices import computes_on_cpus
    from bert_packed.runs.pretraining import build_engine
    from bert_packed.runs.pretraining_data import read_shapes

    answer(on_cpu=computes_on_cpus())
    data = read_shapes(config)
    files, spec = data.train.files, data.train.spec
    model_config = override_dropout(load_model_config(config.bert_config_file, data.train.vocab_size), config)
    engine = build_engine(config, ablate(model_config, config.ablation), data)
    read = eval_batches(files, spec, config.train_batch_size, engine.objective.features)
    batches = CheckedBatches(read, files, spec, engine.model.config, engine.objective.features)
    (batch,) = itertools.islice(batches, 1)

    def take_step():
        start = time.perf_counter()
        float(engine.train_step(batch)["num_sequences"])  # wait for the device
        return time.perf_counter() - start

    take_step()  # compiles
    take_step()
    answer(ready=True)
    for _ in steps:
        answer(seconds=take_step())


def _keep_standard_output():
    """Standard output, for answers alone: what libraries print there goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    sys.exit(run(main, TrainConfig, DESCRIPTION))
