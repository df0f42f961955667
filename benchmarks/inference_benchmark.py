"""Command line: vectors of texts per second, packed, against padded batches of ours and of torch.

python -m benchmarks.inference_benchmark --init_checkpoint=FOLDER --vocab_file=FOLDER/vocab.txt
"""

import contextlib
import dataclasses
import functools
import itertools
import statistics
import sys
from pathlib import Path

from benchmarks.peer_process import PeerProcess, torch_peers
from benchmarks.torch_reference import TorchEncoder
from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import InputError, check_settings, setting
from bert_packed.training.engines import choose_backend

GIGA = 1e9
VECTOR_TOLERANCE = 1e-4  # of the largest: float32, in another order
DESCRIPTION = """
Measures, in turns, how many texts a second become vectors, tokenizing included: packed and one text a row
(bert_packed.evaluation.inference), and with --reference by transformers on torch, in batches padded to
max_seq_length, to the longest text of each batch, and that with the texts sorted by length first. It computes
in a process of its own, as its users have it, and in another whose C library keeps freed memory, as our
commands let theirs ("memory kept"; left out where the environment has MALLOC_... or GLIBC_TUNABLES, which
then hold for all). The vectors must agree.

"GFLOP a text" are the matrix products that a way computes, padding and masked pairs among them: what packing
and sorting save. "GFLOP/s" is how fast the program gets through them: what it owes to its compiler.
"""


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    init_checkpoint: str = setting("", "Hugging Face folder of a BERT, its tokenizer included")
    vocab_file: str = setting("", "its WordPieces, one a line")
    text_file: str = setting("", "texts, one a line; empty = the embedded sample corpus, a text a document")
    num_texts: int = setting(512, "texts to take, the first ones", minimum=1)
    max_seq_length: int = setting(512, "tokens per pack; longer texts are cut", minimum=16)
    batch_size: int = setting(0, "packs, or rows, in a batch of ours; 0 = as load_encoder", minimum=0)
    num_batches_at_once: int = setting(
        0, "batches that ours computes at once; 0 = as load_encoder", minimum=0
    )
    reference_batch_size: int = setting(8, "rows of a batch of transformers", minimum=1)
    repeats: int = setting(7, "timed passes of each way over the texts", minimum=1)
    reference: bool = setting(False, "also measure transformers on torch (extra `reference`)")
    json: str = setting("", "also write the printed table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        for name in ("init_checkpoint", "vocab_file"):
            if not getattr(self, name):
                raise InputError(f"`{name}` must be given. Received: nothing.")


def main(config):
    """Measure, and print the table."""
    choose_backend()
    # TensorFlow and Keras: not for --help
    from benchmarks.encoding_work import flops_of_ways
    from benchmarks.this_machine import cpu_name
    from bert_packed.evaluation import inference
    from bert_packed.runs.interleaved_timing import median_ratio, time_interleaved

    texts = _read_texts(config)
    encoder = inference.load_encoder(
        config.init_checkpoint,
        config.vocab_file,
        max_seq_length=config.max_seq_length,
        batch_size=config.batch_size or None,
        num_batches_at_once=config.num_batches_at_once or None,
    )
    ways = {
        "packed": functools.partial(inference.encode, encoder, texts),
        "padded": functools.partial(inference.encode, encoder, texts, max_sequences_per_pack=1),
    }
    with contextlib.ExitStack() as stack:
        if config.reference:
            ways |= _torch_ways(config, texts, stack)
        _check_agreement(ways)
        factor = inference.packing_factor(encoder, texts)
        seconds = time_interleaved(
            {name: lambda _, way=way: way() for name, way in ways.items()}, config.repeats
        )
    flops = flops_of_ways(config, encoder, texts, list(ways))
    rows = [
        {
            "way": name,
            "texts/s": len(texts) / statistics.median(times),
            "GFLOP a text": flops[name] / GIGA / len(texts),
            "GFLOP/s": flops[name] / GIGA / statistics.median(times),
            "packed / this": median_ratio(times, seconds["packed"]),
            "of the packing factor": median_ratio(times, seconds["packed"]) / factor,
        }
        for name, times in seconds.items()
    ]
    print(f"CPU: {cpu_name()}")
    print_table(rows, config.json)
    print(f"\n{len(texts):,} texts, packing factor {factor:.3f}")


def _read_texts(config):
    if config.text_file:
        from data_gen.text.corpus import read_lines

        lines = (line for _, line in read_lines(config.text_file) if line)
        texts = list(itertools.islice(lines, config.num_texts))
    else:
        from data_gen.text.sample_corpus import read_sample_documents

        documents = itertools.islice(read_sample_documents(), config.num_texts)
        texts = [" ".join(sentences) for sentences in documents]
    if not texts:
        raise InputError(f"`text_file` must hold a text. Received: none in {config.text_file}.")
    return texts


def _torch_ways(config, texts, stack):
    """Passes over the texts by transformers, by name, until the stack ends."""
    if not Path(config.init_checkpoint, "config.json").is_file():
        raise InputError(
            "`init_checkpoint` must be a Hugging Face folder with --reference, as bert_packed.export writes. "
            f"Received: {config.init_checkpoint}."
        )
    ways = {}
    for name, keeps_memory in torch_peers().items():
        arguments = config.init_checkpoint, config.max_seq_length, config.reference_batch_size
        peer = stack.enter_context(PeerProcess(TorchEncoder, *arguments, keeps_memory=keeps_memory))
        encode = functools.partial(peer.call, "encode", texts)
        ways |= {
            f"{name}, padded to {config.max_seq_length}": functools.partial(encode, "max_length"),
            f"{name}, padded to the longest": functools.partial(encode, "longest"),
            f"{name}, sorted by length": functools.partial(encode, "longest", sorts=True),
        }
    return ways


def _check_agreement(ways):
    packed, *others = [way() for way in ways.values()]
    for name, vectors in zip(list(ways)[1:], others, strict=True):
        difference = abs(packed - vectors).max() / abs(vectors).max()
        if not difference < VECTOR_TOLERANCE:
            raise InputError(
                f"`reference` must give our vectors, to {VECTOR_TOLERANCE} of the largest. Received: "
                f"{difference:.2g}, {name}."
            )


if __name__ == "__main__":
    sys.exit(run(main, BenchmarkConfig, DESCRIPTION))
