"""Bars of docs/evidence/results.md: for each picture the numbers of the tables that it shows."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Picture:
    """Bars with their numbers, docs/pictures/`name`.png."""

    name: str
    title: str
    bars: dict  # from a label to (key of `pictures.COLORS`, measurement, table, number of its row, column)


_FILES = "data_throughput", "pack from file to file"
_SST = "finetuning_sst", "speed", 0
_H100, _H100_PEERS = ("accelerator", "steps"), ("accelerator_peers", "steps")
_STEPS = "training_speed", "steps"
PICTURES = (
    Picture(
        "packed_unpacked",
        "real tokens a second in training, bert-mini",
        {
            "packed": ("packed", *_STEPS, 1, "real tokens/s"),
            "a BERT without packs": ("padded", *_STEPS, 2, "real tokens/s"),
            "our model, one sequence a row": ("unpacked", *_STEPS, 3, "real tokens/s"),
        },
    ),
    Picture(
        "data_throughput",
        "sequences packed a second, from file to file",
        {
            "pack, two processes": ("packed", *_FILES, 2, "sequences/s"),
            "pack, one process": ("packed", *_FILES, 1, "sequences/s"),
            "one Example at a time": ("padded", *_FILES, 0, "sequences/s"),
        },
    ),
    Picture(
        "finetuning_sst",
        "sequences a second, SST-2",
        {
            "packed": ("packed", *_SST, "packed, sequences/s"),
            "unpacked": ("unpacked", *_SST, "unpacked, sequences/s"),
        },
    ),
    Picture(
        "accelerator",
        "real tokens a second on an H100, bert-base",
        {
            "packed, fused kernel": ("packed", *_H100, 2, "real tokens/s"),
            "packed, dense": ("packed", *_H100, 0, "real tokens/s"),
            "padding-free, FlexAttention": ("padding-free", *_H100_PEERS, 3, "real tokens/s"),
            "padding-free, varlen": ("padding-free", *_H100_PEERS, 1, "real tokens/s"),
            "unpacked, dense": ("unpacked", *_H100, 1, "real tokens/s"),
            "transformers, padded": ("padded", *_H100, 3, "real tokens/s"),
        },
    ),
)
