"""Command line: fine-tune a packed BERT on GLUE, one task or all, and score it with each task's metrics."""

import dataclasses
import gc
import sys
from pathlib import Path

from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json, write_json
from bert_packed.runs.finetuning_config import ALL_TASKS, GlueConfig
from bert_packed.tasks.glue import TASKS, make_glue_sequences, read_glue
from bert_packed.training.engines import choose_backend

DESCRIPTION = """
Fine-tunes a packed BERT on texts or pairs of texts: the classes of CoLA, SST-2, MRPC, QQP, MNLI, QNLI, RTE
and WNLI, the number of STS-B.

DATA_DIR holds the official train.tsv and dev.tsv. OUTPUT_DIR receives checkpoints, metrics.csv and, from
dev.tsv, predictions.tsv and eval_results.json; with --do_predict, from test.tsv, the file that GLUE's server
takes, such as MRPC.tsv. The same command continues a stopped run. Every step takes train_batch_size
sequences, the same ones whether they are packed or not (--max_sequences_per_pack=1).

--task_name=all does so for each task whose folder is in DATA_DIR, one after the other, and ends with one
table and the average as GLUE counts it. Tasks that are finished are not done again.
"""


def main(config):
    """Train, predict and score; returns an exit status."""
    if not Path(config.data_dir).is_dir():  # now: the import of TensorFlow takes seconds
        raise InputError(f"`data_dir` must be an existing folder. Received: {config.data_dir}.")
    choose_backend()
    return _run_all(config) if config.task_name == ALL_TASKS else _run_task(config)


def _run_all(config):
    """Every task that is there, each in its folder, and the table of all."""
    # TensorFlow: not for --help
    from bert_packed.evaluation.glue_metrics import table_of_tasks
    from bert_packed.evaluation.glue_predictions import asked_files
    from bert_packed.runs.run_directory import RUN_FILE, SCORES_FILE

    folder = Path(config.output_dir)
    if (folder / RUN_FILE).exists():
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
        if status := _run_task(one, skips_finished=True):
            return status
        gc.collect()  # the model, before the next one: its layers point at one another
    if config.do_eval:
        scores = {one.task_name: read_json(Path(one.output_dir) / SCORES_FILE) for one in configs}
        rows, average = table_of_tasks(scores, len(TASKS))
        print()
        print_table(rows)
        for path in (folder / SCORES_FILE, *([config.json] if config.json else [])):
            write_json(path, {**scores, "average": average})
    return 0


def _config_of(config, name):
    """The config of one of all tasks; a model that is not trained now is an earlier run's of all."""
    start = config.init_checkpoint if config.do_train else str(Path(config.init_checkpoint) / name)
    folders = {field: str(Path(getattr(config, field)) / name) for field in ("data_dir", "output_dir")}
    return dataclasses.replace(config, task_name=name, init_checkpoint=start, **folders, json="")


def _train_file(config):
    return str(Path(config.data_dir) / "train.tsv")


def _run_task(config, skips_finished=False):
    """One task; returns an exit status."""
    from bert_packed.data.finetuning_batches import LabelledSequences
    from bert_packed.evaluation.glue_predictions import asked_files, predict_files
    from bert_packed.objectives.finetuning import LABELS, classes_objective, numbers_objective
    from bert_packed.runs import finetuning, run_directory
    from bert_packed.runs.run_summary import describe_counts

    task, inputs = TASKS[config.task_name], {"train.tsv": [_train_file(config)]}
    text = finetuning.read_text_model(config)
    objective = classes_objective(len(task.classes)) if task.classes else numbers_objective()
    files = asked_files(config, task)
    if skips_finished and config.do_train:
        results = [file.result for file in files] + [run_directory.SCORES_FILE] * config.do_eval
        read = [file.path for file in files]
        if finetuning.has_results(config, text, inputs, results, read):
            print(f"finished   {config.output_dir} has its results")
            return 0

    def sequences_of(path, examples):
        sequences, num_cut = make_glue_sequences(
            examples.texts, text.tokenizer, text.vocabulary, config.max_seq_length, path
        )
        counts = {"cut to max_seq_length": num_cut, "lines without all columns left out": examples.num_torn}
        print(f"{path}: {len(sequences):,} examples{describe_counts(counts)}", flush=True)
        return sequences

    # Before training: a mistake in them would show after hours
    read = [(file, file.read(task)) for file in files]
    asked = [(file, examples, sequences_of(file.path, examples)) for file, examples in read]

    def read_training():
        examples = read_glue(_train_file(config), task)
        sequences = sequences_of(_train_file(config), examples)
        return LabelledSequences(sequences, {LABELS.name: examples.labels}), inputs

    def predict(model, folder):
        scores = predict_files(config, task, model, asked, folder)
        return scores if config.do_eval else None

    return finetuning.run_task(config, text, objective, read_training, predict if asked else None)


def command():
    """Run `main` with the flags of the command line; returns the exit status."""
    return run(main, GlueConfig, DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
