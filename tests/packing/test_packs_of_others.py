"""Packs of other libraries, verified: copies of what they made of 3, 5, 2 and 6 tokens."""

import itertools

import numpy as np
import pytest

import bert_packed

LENGTHS = [3, 5, 2, 6]
# seqpacker 0.1.3: `pack_sequences(OF_SEQPACKER, capacity=1024).bins`, as its page on PyPI prints it
OF_SEQPACKER = [1000, 800, 600, 500, 400, 300, 200, 100]
SEQPACKER = [[0], [1, 7], [2, 4], [3, 5, 6]]
# axolotl 0.19: `list(MultipackBatchSampler(SequentialSampler(lengths), batch_size=2, batch_max_len=8,
# lengths=lengths, bin_size=8, drop_last=drop_last))` of these lengths
OF_AXOLOTL = [3, 5, 2, 6, 4]
AXOLOTL = {False: [[[0, 1], [2, 3]], [[4]]], True: [[[0, 1], [2, 3]]]}
# TRL 1.16: `pack_dataset(dataset, seq_length=8, strategy=strategy)[:]`; the column `number` is ours. With
# "bfd_split" there is a sequence of 9 tokens more
TRL = {
    "bfd": {
        "input_ids": [[41, 42, 43, 44, 45, 46, 31, 32], [21, 22, 23, 24, 25, 11, 12, 13]],
        "number": [[3, 3, 3, 3, 3, 3, 2, 2], [1, 1, 1, 1, 1, 0, 0, 0]],
        "seq_lengths": [[6, 2], [5, 3]],
    },
    "bfd_split": {
        "number": [[4] * 8, [3, 3, 3, 3, 3, 3, 2, 2], [1, 1, 1, 1, 1, 0, 0, 0], [4]],
        "seq_lengths": [[8], [6, 2], [5, 3], [1]],
    },
}
# grain 0.2.18: `FirstFitPackIterDataset(dataset, length_struct={"input_ids": 8, "number": 8},
# num_packing_bins=2)`, without `number_segment_ids` and `number_positions`; `number` is ours
OF_GRAIN = [3, 5, 2, 6, 4]
GRAIN = [
    {
        "input_ids": np.array([11, 12, 13, 21, 22, 23, 24, 25]),
        "input_ids_positions": np.array([0, 1, 2, 0, 1, 2, 3, 4]),
        "input_ids_segment_ids": np.array([1, 1, 1, 2, 2, 2, 2, 2]),
        "number": np.array([0, 0, 0, 1, 1, 1, 1, 1]),
    },
    {
        "input_ids": np.array([31, 32, 41, 42, 43, 44, 45, 46]),
        "input_ids_positions": np.array([0, 1, 0, 1, 2, 3, 4, 5]),
        "input_ids_segment_ids": np.array([1, 1, 2, 2, 2, 2, 2, 2]),
        "number": np.array([2, 2, 3, 3, 3, 3, 3, 3]),
    },
    {
        "input_ids": np.array([51, 52, 53, 54, 0, 0, 0, 0]),
        "input_ids_positions": np.array([0, 1, 2, 3, 0, 0, 0, 0]),
        "input_ids_segment_ids": np.array([1, 1, 1, 1, 0, 0, 0, 0]),
        "number": np.array([4, 4, 4, 4, 0, 0, 0, 0]),
    },
]


def trl_numbers(rows):
    pairs = zip(rows["number"], rows["seq_lengths"], strict=True)
    return [np.array(row)[np.cumsum(sizes) - 1] for row, sizes in pairs]


def grain_numbers(packs):
    return [
        one["number"][(one["input_ids_positions"] == 0) & (one["input_ids_segment_ids"] > 0)] for one in packs
    ]


@pytest.mark.parametrize(
    ("packs", "lengths", "max_seq_length", "num_packs"),
    [
        (SEQPACKER, OF_SEQPACKER, 1024, 4),
        (itertools.chain.from_iterable(AXOLOTL[False]), OF_AXOLOTL, 8, 3),
        (trl_numbers(TRL["bfd"]), LENGTHS, 8, 2),
        (grain_numbers(GRAIN), OF_GRAIN, 8, 3),
    ],
    ids=["seqpacker", "axolotl", "TRL", "grain"],
)
def test_packs_of_others_are_verified(packs, lengths, max_seq_length, num_packs):
    found = bert_packed.verify_plan(packs, lengths, max_seq_length)
    assert found.num_packs == num_packs == found.certificate.lower_bound


@pytest.mark.parametrize(
    ("packs", "lengths", "message"),
    [
        (AXOLOTL[True][0], OF_AXOLOTL, "sequence 4 once. Received: 0 times."),  # `drop_last=True`
        (AXOLOTL[False], OF_AXOLOTL, "pack 0 must be a list of whole numbers. Received: [[0, 1], [2, 3]]."),
        (trl_numbers(TRL["bfd_split"]), [*LENGTHS, 9], "every length must be in 1..max_seq_length=8."),
        (trl_numbers(TRL["bfd_split"]), [*LENGTHS, 8], "sequence 4 once. Received: 2 times."),
        (TRL["bfd"], LENGTHS, "`packs` must have sequence_ids, as `pack` makes it."),
        (GRAIN, OF_GRAIN, "pack 0 must be a list of whole numbers. Received: {'input_ids'"),
    ],
)
def test_what_is_wrong_with_packs_of_others(packs, lengths, message):
    with pytest.raises(ValueError) as error:
        bert_packed.verify_plan(packs, lengths, 8)
    assert message in str(error.value) and "\n" not in str(error.value)
