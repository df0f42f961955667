"""Classifiers by `transformers.Trainer`, packed, against padded batches.

python -m benchmarks.trainer --train_file=train.csv --eval_file=dev.csv --init_checkpoint=FOLDER
"""

import dataclasses
import statistics
import sys
import tempfile

import numpy as np

from benchmarks.runner import Settings, median_row, ratios, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import setting
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.tasks.classify.labels import SINGLE, find_problem, read_examples

PACKED, ONE_PLAN, PADDED, SORTED = "packed", "packed, one plan", "padded to the longest", "sorted by length"


@dataclasses.dataclass(frozen=True)
class TrainerConfig(Settings):
    """Interleaved epochs of Trainer over random sequences of a file of classes: packed, batch by batch and by
    one plan, padded to the longest of each batch, and that with batches of sequences of similar length.
    Forward, backward, clipping, AdamW, dropout on, tokenized before. All ways have the same sequences and
    start from the same weights; the scores are of the weights after all epochs.

    "Packed is faster by" is the median of the ratios of neighboring epochs; `from` and `to` are its
    interval of 95 %.
    """

    train_file: str = setting("", "texts with labels, as bert-packed classify reads them", required=True)
    eval_file: str = setting("", "texts with labels to score on", required=True)
    columns: str = setting("", "names of the columns of texts, with a comma; empty = as classify finds them")
    label_column: str = setting("label", "name of the column of labels")
    init_checkpoint: str = setting("", "folder of transformers, its tokenizer included", required=True)
    num_sequences: int = setting(1024, "sequences of an epoch, and most of eval_file", minimum=1)
    max_seq_length: int = setting(128, "tokens of a pack, and most of a sequence", minimum=8)
    batch_size: int = setting(32, "sequences of a step", minimum=1)
    learning_rate: float = setting(5e-5, "of AdamW, falling to 0 in each epoch", minimum=0.0)
    repeats: int = setting(7, "timed epochs of each way, after one that is not", minimum=1)
    threads: int = setting(1, "threads of torch", minimum=1)


def main(config):
    """Measure, print and write."""
    import torch

    torch.set_num_threads(config.threads)
    problem, parts = read_parts(config)
    trainers = make_trainers(config, problem, parts)
    ways = {name: lambda _, trainer=trainer: trainer.train() for name, trainer in trainers.items()}
    seconds = time_interleaved(ways, config.repeats)
    num_tokens = sum(map(len, parts["train"]["input_ids"]))
    rows = way_rows(trainers, seconds, len(parts["train"]), num_tokens)
    for row in rows:
        row["accuracy"] = trainers[row["way"]].evaluate()["eval_accuracy"]
    length = num_tokens / len(parts["train"])
    show("trainer", config, {"epochs": rows}, [f"{len(parts['train']):,} sequences of {length:.1f} tokens"])


def read_parts(config):
    """The `Problem`, and the `Dataset` of train and dev."""
    import datasets
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(config.init_checkpoint)
    problem, parts = None, {}
    for part, path in (("train", config.train_file), ("dev", config.eval_file)):
        examples = read_examples(path, config.columns, config.label_column)
        problem = problem or find_problem(examples, SINGLE)
        rows = np.random.default_rng(0).permutation(len(examples))[: config.num_sequences]
        texts = [[column[row] for row in rows] for column in examples.texts]
        encoded = tokenizer(*texts, truncation=True, max_length=config.max_seq_length)
        labels = problem.numbers(examples)[rows].tolist()
        parts[part] = datasets.Dataset.from_dict({**encoded, "labels": labels})
    return problem, parts


def make_trainers(config, problem, parts):
    """`Trainer` by the name of its way, each with a model from the same weights."""
    import transformers

    from bert_packed.torch import PackingCollator, enable_packing, pack_dataset

    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.init_checkpoint)
    packing = PackingCollator(tokenizer, config.max_seq_length, labels="sequence")
    padding = transformers.DataCollatorWithPadding(tokenizer)
    packed = pack_dataset(parts["train"], config.max_seq_length, labels="sequence")
    num_packs = max(1, round(config.batch_size * len(packed) / len(parts["train"])))

    def make(collator, wrap=lambda model: model, train_dataset=parts["train"], **arguments):
        transformers.set_seed(0)  # of the head, which is new
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            config.init_checkpoint, num_labels=len(problem.names)
        )
        given = {"train_dataset": train_dataset, "eval_dataset": parts["dev"], "compute_metrics": accuracy}
        return make_trainer(config, wrap(model), collator, given, **arguments)

    return {
        PACKED: make(packing, wrap=enable_packing),
        ONE_PLAN: make(packing, wrap=enable_packing, train_dataset=packed, batch_size=num_packs),
        PADDED: make(padding),
        SORTED: make(padding, train_sampling_strategy="group_by_length"),
    }


def accuracy(found):
    """Share of the right classes, as `compute_metrics` gives it."""
    return {"accuracy": (found.predictions.argmax(-1) == found.label_ids).mean()}


def make_trainer(config, model, collator, given, make=None, batch_size=None, **options):
    """A `Trainer`, or what `make` makes, of one epoch a call of `train`, which prints nothing."""
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),  # nothing is written
        per_device_train_batch_size=batch_size or config.batch_size,
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
    trainer = (make or transformers.Trainer)(model, arguments, data_collator=collator, **given)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def way_rows(trainers, seconds, num_sequences, num_tokens):
    """Speeds of all ways: rows of a table."""
    rows = []
    for name, trainer in trainers.items():
        batches = list(trainer.get_train_dataloader())
        computed = sum(batch.get("pack_index", batch["input_ids"]).numel() for batch in batches)
        rows.append(
            {
                "way": name,
                "sequences/s": num_sequences / statistics.median(seconds[name]),
                "real tokens/s": num_tokens / statistics.median(seconds[name]),
                "steps": len(batches),
                "tokens computed / real": computed / num_tokens,
                **median_row("packed is faster by", ratios(seconds[name], seconds[PACKED])),
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(run(main, TrainerConfig))
