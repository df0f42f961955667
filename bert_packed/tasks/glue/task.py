"""Fine-tuning on GLUE, one task or all of them, and scores by each task's metrics."""

import dataclasses
import gc
from pathlib import Path

from bert_packed.core.command_line import print_table
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json, write_json
from bert_packed.runs import run_directory
from bert_packed.runs.run_summary import describe_counts
from bert_packed.tasks import run
from bert_packed.tasks.batches import LabelledSequences
from bert_packed.tasks.classify.losses import LABELS, classes_objective, numbers_objective
from bert_packed.tasks.config import FinetuningResult
from bert_packed.tasks.glue.config import ALL_TASKS
from bert_packed.tasks.glue.files import TASKS, read_glue
from bert_packed.tasks.glue.scores import asked_files, predict_files, table_of_tasks
from bert_packed.tasks.rows import make_text_sequences


def finetune(config, processes):
    """Train, predict and score one task, or all, as a `GlueConfig` says: `FinetuningResult`.

    The scores of all tasks are a dict from task to scores, and `average`.
    """
    return (_run_all if config.task_name == ALL_TASKS else _run_task)(config, processes)


def _run_all(config, processes):
    """Every task that is there, each in its folder, and the table of all."""
    folder = Path(config.output_dir)
    if (folder / run_directory.RUN_FILE).exists():
        raise InputError(f"`output_dir` must not be one task's run for task_name=all. Received: {folder}.")
    names = [name for name in TASKS if (Path(config.data_dir) / name).is_dir()]
    if not names:
        raise InputError(f"`data_dir` must hold a task's folder, such as CoLA. Received: {config.data_dir}.")
    configs = [_config_of(config, name) for name in names]
    for one in configs:  # all files now: a mistake in the last would show after days
        task = TASKS[one.task_name]
        for file in asked_files(one, task):
            file.read(task)
        if one.do_train:
            read_glue(_train_file(one), task)
    for one in configs:
        print(f"\n{one.task_name}", flush=True)
        result = _run_task(one, processes, skips_finished=True)
        if result.stopped_by:
            return dataclasses.replace(result, output_dir=config.output_dir)
        gc.collect()  # the model, before the next one: its layers point at one another
    scores = {}
    if config.do_eval:
        scores = {
            one.task_name: read_json(Path(one.output_dir) / run_directory.SCORES_FILE) for one in configs
        }
        rows, average = table_of_tasks(scores, len(TASKS))
        print()
        print_table(rows)
        scores["average"] = average
        for path in (folder / run_directory.SCORES_FILE, *([config.json] if config.json else [])):
            write_json(path, scores)
    return FinetuningResult(config.output_dir, scores)


def _config_of(config, name):
    """The config of one of all tasks; a model that is not trained now is an earlier run's of all."""
    start = config.init_checkpoint if config.do_train else str(Path(config.init_checkpoint) / name)
    folders = {field: str(Path(getattr(config, field)) / name) for field in ("data_dir", "output_dir")}
    return dataclasses.replace(config, task_name=name, init_checkpoint=start, **folders, json="")


def _train_file(config):
    return str(Path(config.data_dir) / "train.tsv")


def _run_task(config, processes, skips_finished=False):
    """One task: `FinetuningResult`."""
    task, inputs = TASKS[config.task_name], {"train.tsv": [_train_file(config)]}
    text = run.read_text_model(config, processes)
    objective = classes_objective(len(task.classes)) if task.classes else numbers_objective()
    files = asked_files(config, task)
    if skips_finished and config.do_train:
        results = [file.result for file in files] + [run_directory.SCORES_FILE] * config.do_eval
        read = [file.path for file in files]
        if run.has_results(config, text, inputs, results, read):
            print(f"finished   {config.output_dir} has its results")
            return FinetuningResult(config.output_dir, {})

    def sequences_of(path, examples):
        sequences, num_cut = make_text_sequences(examples.texts, text.tokenizer, config.max_seq_length, path)
        counts = {"cut to max_seq_length": num_cut, "lines without all columns left out": examples.num_torn}
        print(f"{path}: {len(sequences):,} examples{describe_counts(counts)}", flush=True)
        return sequences

    # Files are read before training: a mistake in them would show after hours
    read = [(file, file.read(task)) for file in files]
    asked = [(file, examples, sequences_of(file.path, examples)) for file, examples in read]

    def read_training():
        examples = read_glue(_train_file(config), task)
        sequences = sequences_of(_train_file(config), examples)
        return LabelledSequences(sequences, {LABELS.name: examples.labels}), inputs

    def predict(model, folder):
        scores = predict_files(config, task, model, asked, folder)
        return scores if config.do_eval else None

    return run.run_task(config, text, objective, read_training, predict if asked else None)
