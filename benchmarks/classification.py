"""Training of classifiers on packs, beside rows padded to one length, and beside transformers on torch.

python -m benchmarks.classification --train_file=train.csv --init_checkpoint=FOLDER --reference
"""

import contextlib
import dataclasses
import functools
import statistics
import sys

import numpy as np

from benchmarks.peers import transformers_models
from benchmarks.peers.process import torch_processes
from benchmarks.peers.training import check_losses, exported_peer
from benchmarks.runner import Settings, median_row, ratios, show
from benchmarks.training_steps import ADAMW, checkpoint_engine, first_loss, stepping_through
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.training.engines import choose_backend

PACKED, UNPACKED, PADDED, SORTED = "packed", "unpacked", "padded", "sorted by length"


@dataclasses.dataclass(frozen=True)
class ClassificationConfig(Settings):
    """Interleaved steps of `bert-packed classify`: forward, backward, clipping, AdamW, dropout on. Packed and
    unpacked steps hold the same sequences. With --reference also transformers, from the same weights on the
    same sequences: each batch padded to its longest, and all sequences sorted by length before they are
    divided into batches. Texts are tokenized before. Losses without dropout must agree.

    "Packed is faster" is the median of the ratios of neighboring passes over all steps, `from` and `to` its
    interval of 95 %. "Memory kept" is as in benchmarks.training_speed.
    """

    train_file: str = setting("", "texts with labels, as bert-packed classify reads them", required=True)
    columns: str = setting("", "names of the columns of texts, with a comma; empty = as classify finds them")
    label_column: str = setting("label", "name of the column of labels")
    init_checkpoint: str = setting("", "model to start from, with its vocabulary", required=True)
    max_seq_length: int = setting(128, "tokens of a pack, and most of a sequence", minimum=8)
    train_batch_size: int = setting(32, "sequences a step", minimum=1)
    steps: int = setting(8, "steps of a pass", minimum=1)
    repeats: int = setting(7, "timed passes of each way", minimum=1)
    reference: bool = setting(False, "also measure transformers on torch (extra `reference`)")


def main(config):
    """Measure, print and write."""
    choose_backend()
    data, text, objective = read_training(config)
    order = np.random.default_rng(0).permutation(len(data.sequences))
    chosen = order[: config.steps * config.train_batch_size]
    if len(chosen) < config.train_batch_size:
        raise InputError(
            f"`train_file` must fill a step of {config.train_batch_size}. Received: {len(chosen)}."
        )
    lengths = data.sequences["lengths"][chosen]
    ways, computed, losses = {}, {}, {}
    for name, depth in ((PACKED, "max"), (UNPACKED, 1)):
        engine = checkpoint_engine(config.init_checkpoint, text, objective)
        batches = make_batches(config, data, chosen, depth)
        ways[name] = stepping_through(engine, batches)
        computed[name] = sum(batch["token_ids"].size for batch in batches)
        losses[name] = first_loss(engine, batches[0], "num_sequences")
    with contextlib.ExitStack() as stack:
        if config.reference:
            start_peers(stack, engine.model, peer_batches(config, data, chosen), ways, computed, losses)
        check_losses(losses, "`init_checkpoint` must give in all ways the loss")
        seconds = time_interleaved(ways, config.repeats)
    table = [
        {
            "way": name,
            "sequences/s": len(chosen) / statistics.median(times),
            "tokens computed / real": computed[name] / int(lengths.sum()),
            **median_row("packed is faster by", ratios(times, seconds[PACKED])),
        }
        for name, times in seconds.items()
    ]
    note = f"{len(chosen)} sequences a pass, {lengths.mean():.1f} tokens each"
    show("classification", config, {"steps": table}, [note])


def read_training(config):
    """`LabelledSequences`, `TextModel` and `Objective` of a config; one class of several."""
    from bert_packed.tasks import run as task_run
    from bert_packed.tasks.batches import LabelledSequences
    from bert_packed.tasks.classify import labels, losses
    from bert_packed.tasks.classify.config import ClassifyConfig
    from bert_packed.tasks.rows import make_text_sequences

    names = "train_file", "columns", "label_column", "init_checkpoint", "max_seq_length", "train_batch_size"
    classify = ClassifyConfig(output_dir="-", **{name: getattr(config, name) for name in names})
    text = task_run.read_text_model(classify)
    examples = labels.read_examples(config.train_file, config.columns, config.label_column)
    problem = labels.find_problem(examples, labels.SINGLE)
    sequences, _ = make_text_sequences(examples.texts, text.tokenizer, config.max_seq_length)
    data = LabelledSequences(
        sequences, {losses.LABELS.name: problem.numbers(examples)}, classes=problem.names
    )
    return data, text, losses.classes_objective(len(problem.names))


def make_batches(config, data, chosen, depth):
    """The batches of the steps, of equal numbers of packs."""
    from bert_packed.assembly.update_packs import pack_all
    from bert_packed.records.sequences import take
    from bert_packed.tasks.batches import LabelledSequences, make_batch

    steps = []
    for members in np.split(chosen, range(config.train_batch_size, len(chosen), config.train_batch_size)):
        labels = {name: values[members] for name, values in data.labels.items()}
        step = LabelledSequences(take(data.sequences, members), labels)
        steps.append((step, *pack_all(step.sequences["lengths"], config.max_seq_length, depth, "lpfhp")))
    most = max(len(packs) for _, packs, _ in steps)
    deepest = max((spec for _, _, spec in steps), key=lambda spec: spec.max_sequences_per_pack)
    return [make_batch(step, packs, deepest, most) for step, packs, _ in steps]


def peer_batches(config, data, chosen):
    """Arguments of transformers for each step: dict from way to list of dicts."""
    in_order = chosen[np.argsort(data.sequences["lengths"][chosen], kind="stable")]
    return {
        name: [peer_arguments(batch) for batch in make_batches(config, data, own, 1)]
        for name, own in ((PADDED, chosen), (SORTED, in_order))
    }


def peer_arguments(batch):
    """Arguments of transformers for a batch of one sequence a row, as long as the longest: dict of arrays."""
    is_token = batch["sequence_ids"][batch["slot_weights"][:, 0] > 0] > 0
    num_rows, longest = len(is_token), int(is_token.sum(axis=1).max())
    return {
        "input_ids": batch["token_ids"][:num_rows, :longest],
        "token_type_ids": batch["token_type_ids"][:num_rows, :longest],
        "attention_mask": is_token[:, :longest],
        "labels": batch["labels"][:num_rows, 0],
    }


def start_peers(stack, model, rows, ways, computed, losses):
    """Add the ways of transformers, each in its process, until the stack ends."""
    make, name = transformers_models.Training, "AutoModelForSequenceClassification"
    for process, keeps_memory in torch_processes().items():
        peer = exported_peer(stack, model, make, (name, rows, ADAMW), keeps_memory)
        losses[process] = peer.call("loss", PADDED)
        for kind, batches in rows.items():
            ways[f"{process}, {kind}"] = functools.partial(_pass, peer, kind, len(batches))
            computed[f"{process}, {kind}"] = sum(batch["input_ids"].size for batch in batches)


def _pass(peer, kind, num_steps, _):
    for number in range(num_steps):
        peer.call("step", kind, number)


if __name__ == "__main__":
    sys.exit(run(main, ClassificationConfig))
