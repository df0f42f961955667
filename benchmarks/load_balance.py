"""Tiles that attention visits on the device that visits most, over the mean of all, by order of the packs.

python -m benchmarks.load_balance --documents=sentences.txt.gz --vocab_file=vocab.txt --json=load_balance.json
"""

import dataclasses
import functools
import itertools
import sys

import numpy as np

from benchmarks.runner import Settings, show
from benchmarks.synthetic_data import plan_corpus, wikipedia_histogram
from benchmarks.wikipedia_topics import read_articles
from bert_packed.assembly.assignment import PackOrder
from bert_packed.core.command_line import run
from bert_packed.core.settings import setting
from bert_packed.data.read_order import balance_steps, read_order
from bert_packed.packing.histogram import count_lengths
from bert_packed.text.tokenization import encode_sentences, load_vocab, make_tokenizer

NUM_SPECIAL = 2  # [CLS] and [SEP] of a document
TEXT_FROM = 1024  # tokens of a pack; in shorter ones documents would all be cut


@dataclasses.dataclass(frozen=True)
class BalanceConfig(Settings):
    """Orders the packs of a plan without a limit of depth by --balanced_devices and without it, and counts
    the tiles of scores that the kernels of attention visit on each device in each training step.

    The mean and the largest of all steps of the device that visits most, over the mean of the devices.
    """

    documents: str = setting(
        "",
        "sentences, one a line, with an empty line between documents, .txt.gz: their lengths are those for "
        f"packs of {TEXT_FROM} tokens and more; empty = the papers' for Wikipedia, in proportion",
    )
    vocab_file: str = setting("", "WordPieces, with documents", only_with="documents")
    max_seq_lengths: str = setting("512,2048,8192", "tokens of a pack, multiples of tile")
    num_devices: str = setting("8,64", "numbers of devices")
    packs_per_device: str = setting("2,4,8,16,72", "numbers of packs of a device in a step")
    tile: int = setting(64, "tokens of a tile, which a GPU's kernel has in bfloat16", minimum=1)
    num_steps: int = setting(50, "steps", minimum=1)
    seed: int = setting(0, "seed of the order", minimum=0)


def main(config):
    """Measure, print and write."""
    documents = measure_documents(config) if config.documents else None
    lengths, devices, shares = (
        [int(one) for one in text.split(",")]
        for text in (config.max_seq_lengths, config.num_devices, config.packs_per_device)
    )
    rows = []
    for length in lengths:
        histogram = wikipedia_histogram(length)
        if documents is not None and length >= TEXT_FROM:
            histogram = count_lengths(np.minimum(documents, length), length)
        # As many times the data as all steps take in one epoch
        wanted = max(devices) * max(shares) * config.num_steps * length
        plan = plan_corpus(histogram * -(-wanted // (np.arange(1, length + 1) @ histogram)), "max").plan
        tiles = count_tiles(plan, length, config.tile, config.seed)
        for num_devices, share in itertools.product(devices, shares):
            rows.append(measure_order(config, plan, tiles, num_devices, share))
    show("load_balance", config, {"attention of the busiest device": rows})


def measure_documents(config):
    """Tokens of each document with its two special ones: int64 `[n]`."""
    tokenizer = make_tokenizer(load_vocab(config.vocab_file), do_lower_case=True)
    lengths = [sum(map(len, encode_sentences(tokenizer, one))) for one in read_articles(config.documents)]
    return NUM_SPECIAL + np.array(lengths)


def count_tiles(plan, length, tile, seed):
    """Function from pack numbers to the tiles that kernels of attention visit in the packs, int64 `[n]`."""
    from bert_packed.kernels.tpu.attention import may_attend  # imports JAX

    visited = []
    for strategy in plan.strategies:
        padding = length - sum(strategy)
        ids = np.repeat([*range(1, len(strategy) + 1), 0], [*strategy, padding])
        visited.append(int(may_attend(ids[None], tile).sum()))
    order = PackOrder(plan.strategies, seed)
    return lambda packs: np.array(visited)[order.find_strategies(packs)[1]]


def measure_order(config, plan, tiles, num_devices, share):
    """A row of the table."""
    size = num_devices * share
    order = PackOrder(plan.strategies, config.seed)
    row = {"tokens": plan.max_seq_length, "devices": num_devices, "packs of a device": share}
    shuffled = functools.partial(read_order, plan.num_packs, config.seed, 1000)
    balanced = balance_steps(
        shuffled(),
        itertools.repeat(size),
        lambda packs: order.count_pairs(packs, plan.max_seq_length),
        num_devices,
        size,
        plan.num_packs,
    )
    for name, blocks in (("before", shuffled()), ("after", balanced)):
        count = config.num_steps * size
        packs = np.fromiter(itertools.islice(itertools.chain.from_iterable(blocks), count), np.int64, count)
        of_devices = tiles(packs).reshape(config.num_steps, num_devices, share).sum(axis=2)
        ratios = of_devices.max(axis=1) / of_devices.mean(axis=1)
        row |= {name: float(ratios.mean()), f"{name}, worst step": float(ratios.max())}
    return row


if __name__ == "__main__":
    sys.exit(run(main, BalanceConfig))
