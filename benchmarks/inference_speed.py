"""Vectors of texts per second, packed, against padded batches of ours and of transformers on torch.

python -m benchmarks.inference_speed --init_checkpoint=FOLDER --vocab_file=FOLDER/vocab.txt --reference
"""

import contextlib
import dataclasses
import functools
import itertools
import statistics
import sys
from pathlib import Path

from benchmarks.peers.process import PeerProcess, torch_processes
from benchmarks.peers.transformers_models import Encoder
from benchmarks.runner import Settings, median_row, ratios, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.training.engines import choose_backend
from data_gen.text import corpus as sample_corpus
from data_gen.text.corpus import read_lines

REFERENCE_ROWS = 8  # of a batch of transformers
VECTOR_TOLERANCE = 1e-4  # relative to the largest value: float32, in another order


@dataclasses.dataclass(frozen=True)
class InferenceConfig(Settings):
    """Interleaved passes over all texts, tokenizing included: packed, and one text a row
    (bert_packed.evaluation.inference); with --reference also by transformers on torch, in batches padded
    to max_seq_length, to the longest text of each batch, and that with the texts sorted by length first.
    It runs in a process as its users have it, and in another whose C library keeps freed memory, as our
    commands let theirs ("memory kept"; left out where the environment has MALLOC_... or GLIBC_TUNABLES,
    which then hold for all). The vectors must agree.

    "Packed is faster by" is the median of the ratios of neighboring passes; `from` and `to` are its
    interval of 95 %.
    """

    init_checkpoint: str = setting("", "Hugging Face folder of a BERT, its tokenizer included", required=True)
    vocab_file: str = setting("", "its WordPieces, one a line", required=True)
    text_file: str = setting("", "texts, one a line; empty = the embedded sample corpus, a text a document")
    num_texts: int = setting(512, "texts to take, the first ones", minimum=1)
    max_seq_length: int = setting(512, "tokens per pack; longer texts are cut", minimum=16)
    batch_size: int = setting(0, "packs, or rows, in a batch of ours; 0 = as load_encoder", minimum=0)
    repeats: int = setting(7, "timed passes of each way over the texts", minimum=1)
    reference: bool = setting(False, "also measure transformers on torch (extra `reference`)")


def main(config):
    """Measure, print and write."""
    choose_backend()
    from bert_packed.evaluation import inference  # Keras: only now

    texts = read_texts(config)
    encoder = inference.load_encoder(
        config.init_checkpoint,
        config.vocab_file,
        max_seq_length=config.max_seq_length,
        batch_size=config.batch_size or None,
    )
    ways = {
        "packed": functools.partial(encoder.encode, texts, normalize=False),  # as transformers
        "padded": functools.partial(encoder.encode, texts, max_sequences_per_pack=1, normalize=False),
    }
    with contextlib.ExitStack() as stack:
        if config.reference:
            ways |= peer_ways(config, texts, stack)
        check_agreement(ways)
        seconds = time_interleaved(
            {name: lambda _, way=way: way() for name, way in ways.items()}, config.repeats
        )
    factor = encoder.packing_factor(texts)
    note = f"{len(texts):,} texts, packing factor {factor:.3f}"
    show("inference_speed", config, {"texts": speed_rows(seconds, len(texts), factor)}, [note])


def read_texts(config):
    """The texts to encode: list of str; raises `InputError` where there is none."""
    if config.text_file:
        lines = (line for _, line in read_lines(config.text_file) if line)
        texts = list(itertools.islice(lines, config.num_texts))
    else:
        documents = itertools.islice(sample_corpus.read_sample_documents(), config.num_texts)
        texts = [" ".join(sentences) for sentences in documents]
    if not texts:
        raise InputError(f"`text_file` must hold a text. Received: none in {config.text_file}.")
    return texts


def peer_ways(config, texts, stack):
    """Passes over the texts by transformers, by name, until the stack ends."""
    if not Path(config.init_checkpoint, "config.json").is_file():
        raise InputError(
            "`init_checkpoint` must be a Hugging Face folder with --reference, as bert-packed export writes. "
            f"Received: {config.init_checkpoint}."
        )
    ways = {}
    for name, keeps_memory in torch_processes().items():
        arguments = config.init_checkpoint, config.max_seq_length, REFERENCE_ROWS
        peer = stack.enter_context(PeerProcess(Encoder, *arguments, keeps_memory=keeps_memory))
        encode = functools.partial(peer.call, "encode", texts)
        ways |= {
            f"{name}, padded to {config.max_seq_length}": functools.partial(encode, "max_length"),
            f"{name}, padded to the longest": functools.partial(encode, "longest"),
            f"{name}, sorted by length": functools.partial(encode, "longest", sorts=True),
        }
    return ways


def check_agreement(ways):
    """Raise `InputError` where a way gives other vectors than the first."""
    packed, *others = [way() for way in ways.values()]
    for name, vectors in zip(list(ways)[1:], others, strict=True):
        difference = abs(packed - vectors).max() / abs(vectors).max()
        if not difference < VECTOR_TOLERANCE:  # NaN too
            raise InputError(
                f"`reference` must give our vectors, to {VECTOR_TOLERANCE} of the largest. Received: "
                f"{difference:.2g}, {name}."
            )


def speed_rows(seconds, num_texts, factor):
    """Rows of the table, from seconds of passes over all texts by way."""
    rows = []
    for name, times in seconds.items():
        gains = ratios(times, seconds["packed"])
        rows.append(
            {
                "way": name,
                "texts/s": num_texts / statistics.median(times),
                **median_row("packed is faster by", gains),
                "of the packing factor": statistics.median(gains) / factor,
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(run(main, InferenceConfig))
