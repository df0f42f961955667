"""How many operations each way to turn texts into vectors computes, padding and masked pairs among them."""

import numpy as np

from benchmarks.peer_process import torch_peers
from benchmarks.torch_reference import longest_first
from bert_packed.checkpoints import starting_weights
from bert_packed.evaluation import inference
from bert_packed.models.flops import bert_flops

FORWARD = 1 / 3  # of the operations of `bert_flops`, which are those of a forward and a backward pass


def flops_of_ways(config, encoder, texts, names):
    """What each way of the benchmark of inference computes on all texts.

    Args:
        config: `inference_benchmark.BenchmarkConfig`.
        encoder: As from `inference.load_encoder`.
        texts: List of str.
        names: The ways, in this order: packed, padded, and where they are measured transformers padded to one
            length, to each batch's longest, and that sorted by length, for each of `torch_peers`.

    Returns:
        Dict from name to operations.
    """
    lengths = inference.count_tokens(encoder, texts)
    in_order = [lengths[index] for index in longest_first(texts)]
    rows, length = config.reference_batch_size, config.max_seq_length
    theirs = [
        padded_batches(lengths, rows, length),
        padded_batches(lengths, rows),
        padded_batches(in_order, rows),
    ]
    shapes = [
        full_batches(inference.count_packs(encoder, texts), encoder.batch_size, length),
        full_batches(len(texts), encoder.batch_size, length),
        *(theirs * len(torch_peers())),
    ]
    model_config = starting_weights.read_config(config.init_checkpoint)
    return {name: forward_flops(model_config, of_way) for name, of_way in zip(names, shapes, strict=False)}


def forward_flops(config, shapes):
    """The operations of an encoder on batches: of every token, and every pair of a row, padding too.

    Args:
        config: `ModelConfig`.
        shapes: List of (rows, tokens a row), one a batch.
    """
    num_tokens = sum(rows * length for rows, length in shapes)
    num_pairs = sum(rows * length**2 for rows, length in shapes)
    return FORWARD * bert_flops(config, {"num_tokens": num_tokens, "num_pairs": num_pairs})


def full_batches(num_rows, batch_size, length):
    """Shapes of batches of one size, the last filled up.

    5 rows, 2 at once, of 512   ->   [(2, 512), (2, 512), (2, 512)]
    """
    return [(batch_size, length)] * -(-num_rows // batch_size)


def padded_batches(lengths, batch_size, length=None):
    """Shapes of batches whose last has the rows that are left.

    lengths [3 7 2], 2 at once   ->   [(2, 7), (1, 2)]

    Args:
        lengths: Tokens of each text, in the order in which they are computed.
        batch_size: Rows of a batch.
        length: Tokens of every row; None for those of each batch's longest text.
    """
    parts = [lengths[first : first + batch_size] for first in range(0, len(lengths), batch_size)]
    return [(len(part), int(np.max(part)) if length is None else length) for part in parts]
