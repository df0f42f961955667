"""Command line: fine-tune a packed BERT on a GLUE task, and score it with the task's own metrics."""

import sys
from pathlib import Path

from bert_packed.runs.finetuning_config import GlueConfig
from bert_packed.training.engines import choose_backend
from data_gen.cli.command_line import run
from data_gen.jobs.files import write_text
from data_gen.tasks.glue import TASKS, make_glue_sequences, read_glue

PREDICTIONS_FILE = "predictions.tsv"
DESCRIPTION = """
Fine-tunes a packed BERT on texts or pairs of texts: the classes of CoLA, SST-2, MRPC, RTE and WNLI, the
number of STS-B.

DATA_DIR holds the official train.tsv and dev.tsv. OUTPUT_DIR receives checkpoints, metrics.csv and, from
dev.tsv, predictions.tsv and eval_results.json. The same command continues a stopped run. Every step takes
train_batch_size sequences, the same ones whether they are packed or not (--max_sequences_per_pack=1).
"""


def main(config):
    """Train, predict and score; returns an exit status."""
    choose_backend()
    # TensorFlow: not for --help
    from bert_packed.data.finetuning_batches import LabelledSequences
    from bert_packed.objectives.classes import LABELS, classes_objective, numbers_objective
    from bert_packed.runs import finetuning, run_directory, vocabulary

    task = TASKS[config.task_name]
    vocab_path, wordpieces, tokenizer = vocabulary.load_tokenizer(config)
    model_config = finetuning.read_model_config(config, len(wordpieces))
    vocabulary.check_vocabulary(config, vocab_path, len(wordpieces), model_config, print)
    objective = classes_objective(len(task.classes)) if task.classes else numbers_objective()

    def read(name):
        path = str(Path(config.data_dir) / name)
        examples = read_glue(path, task)
        sequences, num_cut = make_glue_sequences(
            examples.texts, tokenizer, wordpieces, config.max_seq_length, path
        )
        warning = f"\n  warning: {num_cut:,} cut to max_seq_length" if num_cut else ""
        print(f"{path}: {len(sequences):,} examples{warning}", flush=True)
        return path, LabelledSequences(sequences, {LABELS.name: examples.labels})

    # Before training: a mistake in it would show after hours
    held_out = read("dev.tsv")[1] if config.do_eval else None
    with run_directory.locked(config.output_dir) as folder:

        def read_training():
            path, data = read("train.tsv")
            return data, {"train.tsv": [path]}

        model, stopped_by = finetuning.train_or_load(
            config, model_config, objective, read_training, vocab_path, folder
        )
        if stopped_by:
            return 128 + stopped_by
        if config.do_eval:
            _evaluate(config, task, model, held_out, folder)
    return 0


def _evaluate(config, task, model, data, folder):
    """Predict every example, write the predictions and print the task's scores."""
    import numpy as np

    from bert_packed.evaluation.glue_metrics import METRICS
    from bert_packed.objectives.classes import LABELS
    from bert_packed.runs import finetuning

    outputs, num_packs = finetuning.predict_packed(config, model, data.sequences)
    logits = np.stack(outputs["logits"])
    predicted = logits.argmax(axis=1) if task.classes else logits[:, 0]
    shown = [task.classes[value] if task.classes else f"{value:.6g}" for value in predicted.tolist()]
    lines = [f"{index}\t{value}\n" for index, value in enumerate(shown)]
    write_text(str(folder / PREDICTIONS_FILE), "index\tprediction\n" + "".join(lines))
    print(f"predicted  {len(predicted):,} examples in {num_packs:,} packs")
    true = data.labels[LABELS.name]
    scores = {name: METRICS[name](predicted, true) for name in task.metrics}
    finetuning.tell_scores(config, scores, folder)


def command():
    """Run `main` with the flags of the command line; returns the exit status."""
    return run(main, GlueConfig, DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
