"""Fine-tuning on GLUE, one task or all of them, and scores by each task's metrics."""

import dataclasses
import gc
from pathlib import Path

import numpy as np

from bert_packed.core.command_line import print_table
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json, write_text
from bert_packed.runs import run_directory
from bert_packed.tasks import run
from bert_packed.tasks.classify import scores as label_scores
from bert_packed.tasks.classify.task import AskedFile, check_num_texts, learn, stored_problem
from bert_packed.tasks.config import FinetuningResult
from bert_packed.tasks.glue.config import ALL_TASKS
from bert_packed.tasks.glue.files import SCORE_RANGE, TASKS, read_glue, read_glue_test


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
        for path in [*_dev_files(one, task).values(), *([_train_file(one)] if one.do_train else [])]:
            task.problem.numbers(read_glue(path, task))
        for path in _test_files(one, task).values():
            read_glue_test(path, task)
    for one in configs:
        print(f"\n{one.task_name}", flush=True)
        result = _run_task(one, processes, skips_finished=True)
        if result.stopped_by:
            return dataclasses.replace(result, output_dir=config.output_dir)
        gc.collect()  # the model, before the next one: its layers point at one another
    scores = {}
    if config.do_eval:
        for one in configs:
            scores[one.task_name] = read_json(Path(one.output_dir) / run_directory.SCORES_FILE)
        rows, average = table_of_tasks(scores)
        print()
        print_table(rows)
        scores["average"] = average
        run.write_scores(config, scores, folder)
    return FinetuningResult(config.output_dir, scores)


def _config_of(config, name):
    """The config of one of all tasks; a model that is not trained now is an earlier run's of all."""
    start = config.init_checkpoint if config.do_train else str(Path(config.init_checkpoint) / name)
    folders = {field: str(Path(getattr(config, field)) / name) for field in ("data_dir", "output_dir")}
    return dataclasses.replace(config, task_name=name, init_checkpoint=start, **folders, json="")


def _train_file(config):
    return str(Path(config.data_dir) / "train.tsv")


def _run_task(config, processes, skips_finished=False):
    task, inputs = TASKS[config.task_name], {"train.tsv": [_train_file(config)]}
    text = run.read_text_model(config, processes)
    run.check_export(config)
    if not config.do_train:
        _check_labels(config, task)
    dev, tests = _dev_files(config, task), _test_files(config, task)
    if skips_finished and config.do_train:
        results = [*dev, *tests, run.MODEL_FOLDER] + [run_directory.SCORES_FILE] * config.do_eval
        if run.has_results(config, text, inputs, results, [*dev.values(), *tests.values()]):
            print(f"finished   {config.output_dir} has its results")
            return FinetuningResult(config.output_dir, {})
    # Files are read before training: a mistake in them would show after hours
    asked = [
        *(_dev_file(task, path, result) for result, path in dev.items()),
        *(_test_file(task, path, result) for result, path in tests.items()),
    ]
    training = read_glue(_train_file(config), task) if config.do_train else None
    names = tuple(f"{name}{ending}" for ending in task.endings.values() for name in task.metrics)
    evaluation = (names, list(dev.values())) if dev else None
    return learn(config, text, task.problem, training, inputs, asked, evaluation)


def _check_labels(config, task):
    """Raise `InputError` for a fine-tuned model that learned something else than the task's labels."""
    stored = stored_problem(config.init_checkpoint, task.problem.kind)
    check_num_texts(stored, task.problem.num_texts, "`data_dir`")
    if stored.is_chance:
        rule = f"have learned the numbers of {task.name}"
        raise InputError(f"`init_checkpoint` must {rule}. Received: {config.init_checkpoint}, of a chance.")
    names, wanted = ([name.lower() for name in side.names] for side in (stored, task.problem))
    if names in (wanted, [str(number) for number in range(len(names))]):  # the latter are no names
        return
    if sorted(names) == sorted(wanted):
        raise InputError(
            f"`init_checkpoint` must have its labels in the order {', '.join(wanted)}. Received: "
            f"{', '.join(names)}."
        )
    if len(names) == len(wanted):
        print(f"labels     {', '.join(names)} of init_checkpoint are taken for {', '.join(wanted)}")


def _dev_files(config, task):
    """Dict from the name of the file of predictions to the path of a file with labels."""
    folder, endings = Path(config.data_dir), task.endings.values() if config.do_eval else ()
    return {f"predictions{ending}.tsv": str(folder / f"dev{ending}.tsv") for ending in endings}


def _test_files(config, task):
    paths = task.test_files(config.data_dir) if config.do_predict else {}
    return {f"{name}.tsv": str(path) for name, path in paths.items()}


def _dev_file(task, path, result):
    examples, problem = read_glue(path, task), task.problem
    labels, ending = problem.numbers(examples), result.removeprefix("predictions").removesuffix(".tsv")

    def score(logits):
        scores = label_scores.score(problem, logits, labels, task.metrics)
        return {f"{name}{ending}": value for name, value in scores.items()}

    def write(logits, folder):
        _write(folder / result, range(len(logits)), problem, label_scores.decide(problem, logits))

    return AskedFile(examples, write, score)


def _test_file(task, path, result):
    examples, indices = read_glue_test(path, task)

    def write(logits, folder):
        decided = label_scores.decide(task.problem, logits)
        # A regression may leave the range of the labels
        decided = decided if task.classes else decided.clip(*SCORE_RANGE)
        _write(folder / result, indices, task.problem, decided)

    return AskedFile(examples, write)


def _write(path, indices, problem, decided):
    """Write predictions in the form of GLUE's server: a header, then an index and a label a line."""
    lines = ["index\tprediction\n"]
    for index, one in zip(indices, decided.tolist(), strict=True):
        shown = problem.shown(one)
        lines.append(f"{index}\t{shown if problem.names else f'{shown:.6g}'}\n")
    write_text(str(path), "".join(lines))


def table_of_tasks(scores):
    """Rows of a table of tasks, and GLUE's average: the mean of the means of each task's scores.

    `scores` is a dict from task to a dict of float.
    """
    rows = []
    for task, its in scores.items():
        shown = ", ".join(f"{name} {value:.4f}" for name, value in its.items())
        rows.append({"task": task, "scores": shown, "mean": float(np.mean(list(its.values())))})
    average = float(np.mean([row["mean"] for row in rows]))
    rows.append({"task": "average", "scores": f"{len(scores)} of {len(TASKS)} tasks", "mean": average})
    return rows, average
