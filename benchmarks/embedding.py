"""Contrastive training and vectors of texts, packed, beside sentence-transformers.

python -m benchmarks.embedding --train_file=pairs.jsonl --init_checkpoint=FOLDER --reference
"""

import contextlib
import dataclasses
import functools
import statistics
import sys

import numpy as np

from benchmarks.inference_speed import check_agreement, speed_rows
from benchmarks.peers.process import AS_IT_IS, PeerProcess, torch_processes
from benchmarks.peers.sentence_transformers_models import KINDS, PLAIN, SentenceTransformers
from benchmarks.peers.training import check_losses
from benchmarks.runner import Settings, median_row, ratios, show
from benchmarks.training_steps import ADAMW, checkpoint_engine, first_loss, stepping
from bert_packed.core.command_line import run
from bert_packed.core.settings import setting
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.training.engines import choose_backend

NUM_STEPS = 2  # whose rows alternate
PACKED, PACKED_PARTS, UNPACKED_PARTS = "packed", "packed, micro-batches", "unpacked, micro-batches"
PEER = "sentence-transformers"


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig(Settings):
    """Interleaved steps of `bert-packed embed`, whose loss is the ranking of positives: forward, backward,
    clipping, AdamW, dropout on. A step is one micro-batch, or several in two passes, with texts packed and
    with one a row. With --reference also by sentence-transformers on the same rows from the same weights: its
    plain loss, its cached one, and that with the rows sorted by length. Texts are tokenized before, and
    losses without dropout must agree. A second table has passes of `encode` over the texts, tokenizing
    included.

    Of ours "packed is faster" compares with packed steps of as many passes: plain with one micro-batch, the
    others with several. It is the median of the ratios of neighboring steps; `from` and `to` are its interval
    of 95 %. "Memory kept" is as in benchmarks.inference_speed.
    """

    train_file: str = setting("", "pairs, each text once, as bert-packed embed reads them", required=True)
    init_checkpoint: str = setting("", "folder of sentence-transformers, or with vocab.txt", required=True)
    max_seq_length: int = setting(128, "tokens of a pack, and most of a text", minimum=8)
    train_batch_size: int = setting(64, "rows a step", minimum=2)
    micro_batch_size: int = setting(8, "packs computed at once where there are micro-batches", minimum=1)
    mini_batch_size: int = setting(32, "texts that the cached loss computes at once", minimum=1)
    num_texts: int = setting(1024, "texts to encode, the first ones; 0 = none", minimum=0)
    repeats: int = setting(7, "timed steps, and passes, of each way", minimum=1)
    reference: bool = setting(False, "also measure sentence-transformers on torch (extra `reference`)")


def main(config):
    """Measure, print and write."""
    choose_backend()
    training = read_training(config)
    updates = {depth: plan_steps(config, training, depth) for depth in ("max", 1)}
    ways, losses, computed = {}, {}, {}
    for name, depth, at_once in (
        (PACKED, "max", 0),
        (PACKED_PARTS, "max", config.micro_batch_size),
        (UNPACKED_PARTS, 1, config.micro_batch_size),
    ):
        engine, batches = build_steps(training, updates[depth], at_once)
        ways[name], losses[name] = stepping(engine, batches), first_loss(engine, batches[0], "num_rows")
        at_once = at_once or len(batches[0]["token_ids"])
        num_parts = -(-len(updates[depth].packs[0]) // at_once)  # others are skipped
        computed[name] = num_parts * at_once * config.max_seq_length
    with contextlib.ExitStack() as stack:
        peers = start_peers(config, training, updates["max"], stack) if config.reference else {}
        for process, peer in peers.items():
            for kind in KINDS:
                name = f"{process}, {kind}"
                ways[name] = functools.partial(peer.call, "step", kind)
                losses[name], computed[name] = peer.call("loss", kind)
        check_losses(losses, "`train_file` must have each text once, so that losses are equal,")
        # Before the steps, which change the peers' weights
        encoded = {"encode": encode_rows(config, training.rows, peers)} if config.num_texts else {}
        seconds = time_interleaved(ways, config.repeats)
        num_tokens = training.data.sequences["lengths"][updates["max"].packs[0].members].sum()
        padding = {name: number / int(num_tokens) for name, number in computed.items()}
        tables = {"steps": step_rows(seconds, config.train_batch_size, padding), **encoded}
    factor, length = updates["max"].packing_factor, training.data.sequences["lengths"].mean()
    note = f"{config.train_batch_size} rows a step, {length:.1f} tokens a text, packing factor {factor:.3f}"
    show("embedding", config, tables, [note])


@dataclasses.dataclass(frozen=True)
class Training:
    """What steps are made of."""

    config: object  # `EmbedConfig`
    text: object  # `TextModel`
    rows: object  # `Rows`
    data: object  # `LabelledSequences` of all texts, row by row
    objective: object


def read_training(config):
    """The `Training` of a config; raises `InputError`, for scored pairs too."""
    from bert_packed.tasks import run as task_run
    from bert_packed.tasks.embed import files, losses, task
    from bert_packed.tasks.embed.config import EmbedConfig

    names = "train_file", "init_checkpoint", "max_seq_length", "train_batch_size"
    given = {name: getattr(config, name) for name in names}
    embed = EmbedConfig(output_dir="-", loss=losses.RANKING, **given)
    text = task_run.read_text_model(embed)
    rows = files.read_rows(embed.train_file)
    settings = task.vector_settings(embed, text)
    objective = losses.embedding_objective(task.loss_settings(embed, rows, settings))
    return Training(embed, text, rows, task.training_data(embed, rows, text.tokenizer, settings), objective)


def plan_steps(config, training, depth):
    """`Updates` of `NUM_STEPS` steps, which have the same rows at each depth."""
    from bert_packed.assembly.update_packs import plan_row_updates

    sizes = config.train_batch_size, len(training.rows.texts), config.max_seq_length
    algorithm = training.config.packing_algorithm
    return plan_row_updates(training.data.sequences["lengths"], NUM_STEPS, *sizes, depth, algorithm, seed=0)


def texts_of_steps(rows, updates):
    """Texts of each step's rows, in order: a list of R lists for each."""
    steps = []
    for packs, places in zip(updates.packs, updates.places, strict=True):
        firsts = packs.members[np.argsort(places)][:: len(rows.texts)]  # the first text of each row
        numbers = firsts // len(rows.texts)
        steps.append([[column[number] for number in numbers] for column in rows.texts])
    return steps


def build_steps(training, updates, at_once):
    """An engine with the checkpoint's weights, and a batch for each step; `at_once` of 0 is all packs."""
    from bert_packed.tasks.batches import train_batches

    engine = checkpoint_engine(training.config.init_checkpoint, training.text, training.objective, at_once)
    num_packs = -(-updates.num_packs // (at_once or 1)) * (at_once or 1)
    return engine, list(train_batches(training.data, updates, num_packs))


def start_peers(config, training, updates, stack):
    """Processes of sentence-transformers by name, until the stack ends."""
    embed, steps = training.config, texts_of_steps(training.rows, updates)
    arguments = config.init_checkpoint, config.max_seq_length, steps, embed.temperature
    arguments = *arguments, config.mini_batch_size, ADAMW
    peers = {}
    for name, keeps_memory in torch_processes().items():
        peer = PeerProcess(SentenceTransformers, *arguments, keeps_memory=keeps_memory)
        peers[name.replace(AS_IT_IS, PEER)] = stack.enter_context(peer)
    return peers


def step_rows(seconds, num_rows, padding):
    """Speeds of all ways: rows of a table."""
    rows = []
    for name, times in seconds.items():
        # One pass over the texts compares with one, two with two
        baseline = PACKED if name == PACKED or name.endswith(PLAIN) else PACKED_PARTS
        rows.append(
            {
                "way": name,
                "rows/s": num_rows / statistics.median(times),
                "tokens computed / real": padding[name],
                **median_row("packed is faster by", ratios(times, seconds[baseline])),
            }
        )
    return rows


def encode_rows(config, rows, peers):
    """Speeds of `encode`: rows of a table."""
    from bert_packed.evaluation import inference

    texts = [text for row in zip(*rows.texts, strict=True) for text in row][: config.num_texts]
    encoder = inference.load_encoder(config.init_checkpoint, max_seq_length=config.max_seq_length)
    ways = {"packed": functools.partial(encoder.encode, texts, normalize=True)}
    ways |= {name: functools.partial(peer.call, "encode", texts) for name, peer in peers.items()}
    check_agreement(ways)
    timed = {name: lambda _, way=way: way() for name, way in ways.items()}
    return speed_rows(time_interleaved(timed, config.repeats), len(texts), encoder.packing_factor(texts))


if __name__ == "__main__":
    sys.exit(run(main, EmbeddingConfig))
