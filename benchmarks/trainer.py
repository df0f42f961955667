"""Classifiers by `transformers.Trainer`, packed, against padded batches.

python -m benchmarks.trainer --data_dir=glue --init_checkpoint=FOLDER
"""

import csv
import dataclasses
import functools
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.runner import Settings, median_row, parse_names, ratios, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.runs.interleaved_timing import time_interleaved

COLUMNS = {"SST-2": ("sentence", "label"), "MRPC": ("#1 String", "#2 String", "Quality")}
PACKED, ONE_PLAN, PADDED, SORTED = "packed", "packed, one plan", "padded to the longest", "sorted by length"


@dataclasses.dataclass(frozen=True)
class TrainerConfig(Settings):
    """Interleaved epochs of Trainer over the first sequences of tasks of GLUE: packed, batch by batch and by
    one plan, padded to the longest of each batch, and that with batches of sequences of similar length.
    Forward, backward, clipping, AdamW, dropout on, tokenized before. All ways have the same sequences and
    start from the same weights; the scores are of the weights after all epochs.

    "Packed is faster by" is the median of the ratios of neighboring epochs; `from` and `to` are its
    interval of 95 %.
    """

    data_dir: str = setting("", "folder with a folder of train.tsv and dev.tsv a task", required=True)
    init_checkpoint: str = setting("", "folder of transformers, its tokenizer included", required=True)
    tasks: str = setting(
        "SST-2,MRPC", "tasks, separated by commas", parse=lambda text: parse_names(text, COLUMNS)
    )
    num_sequences: int = setting(1024, "sequences of an epoch, the first ones", minimum=1)
    max_seq_length: int = setting(128, "tokens of a pack, and most of a sequence", minimum=8)
    batch_size: int = setting(32, "sequences of a step", minimum=1)
    learning_rate: float = setting(5e-5, "of AdamW, falling to 0 in each epoch", minimum=0.0)
    repeats: int = setting(7, "timed epochs of each way, after one that is not", minimum=1)
    threads: int = setting(1, "threads of torch", minimum=1)


def main(config):
    """Measure, print and write."""
    import torch

    torch.set_num_threads(config.threads)
    tables, notes = {}, []
    for task in config.tasks.split(","):
        parts = {part: read_part(config, task, part) for part in ("train", "dev")}
        trainers = make_trainers(config, parts)
        seconds = time_interleaved(
            {name: lambda _, trainer=trainer: trainer.train() for name, trainer in trainers.items()},
            config.repeats,
        )
        num_tokens = sum(map(len, parts["train"]["input_ids"]))
        tables[task] = task_rows(trainers, seconds, len(parts["train"]), num_tokens)
        length = num_tokens / len(parts["train"])
        notes.append(f"{task}: {len(parts['train']):,} sequences of {length:.1f} tokens")
    show("trainer", config, tables, notes)


def read_part(config, task, part):
    """The `Dataset` of a task's train or dev file; raises `InputError`."""
    import datasets
    import transformers

    path, (*texts, label) = Path(config.data_dir, task, f"{part}.tsv"), COLUMNS[task]
    if not path.is_file():
        raise InputError(f"`data_dir` must hold {task}/{part}.tsv. Received: {config.data_dir}.")
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if part == "train":
        rows = rows[: config.num_sequences]
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.init_checkpoint)
    columns = ([row[name] for row in rows] for name in texts)
    encoded = tokenizer(*columns, truncation=True, max_length=config.max_seq_length)
    return datasets.Dataset.from_dict({**encoded, "labels": [int(row[label]) for row in rows]})


def make_trainers(config, parts):
    """`Trainer` by the name of its way, each with a model from the same weights."""
    import transformers

    from bert_packed.torch import PackingCollator, enable_packing, pack_dataset

    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.init_checkpoint)
    packing = PackingCollator(tokenizer, config.max_seq_length, labels="sequence")
    padding = transformers.DataCollatorWithPadding(tokenizer)
    packed = pack_dataset(parts["train"], config.max_seq_length, labels="sequence")
    num_packs = max(1, round(config.batch_size * len(packed) / len(parts["train"])))
    make = functools.partial(make_trainer, config, parts)
    return {
        PACKED: make(packing, wrap=enable_packing),
        ONE_PLAN: make(packing, wrap=enable_packing, train_dataset=packed, batch_size=num_packs),
        PADDED: make(padding),
        SORTED: make(padding, train_sampling_strategy="group_by_length"),
    }


def make_trainer(config, parts, collator, wrap=lambda model: model, train_dataset=None, **options):
    """A `Trainer` of one epoch a call of `train`, which prints nothing."""
    import transformers

    batch_size = options.pop("batch_size", config.batch_size)
    transformers.set_seed(0)  # of the head, which is new
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        config.init_checkpoint, num_labels=2
    )
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),  # nothing is written
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=config.batch_size,
        num_train_epochs=1,
        learning_rate=config.learning_rate,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        **options,
    )
    trainer = transformers.Trainer(
        wrap(model),
        arguments,
        train_dataset=train_dataset or parts["train"],
        eval_dataset=parts["dev"],
        data_collator=collator,
        compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(-1) == found.label_ids).mean()},
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def task_rows(trainers, seconds, num_sequences, num_tokens):
    """Speeds and scores of all ways: rows of a table."""
    rows = []
    for name, trainer in trainers.items():
        batches = list(trainer.get_train_dataloader())
        computed = sum(batch.get("pack_index", batch["input_ids"]).numel() for batch in batches)
        rows.append(
            {
                "way": name,
                "sequences/s": num_sequences / statistics.median(seconds[name]),
                "steps": len(batches),
                "tokens computed / real": computed / num_tokens,
                **median_row("packed is faster by", ratios(seconds[name], seconds[PACKED])),
                "accuracy": trainer.evaluate()["eval_accuracy"],
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(run(main, TrainerConfig))
