"""Packs of other libraries are verified: lists, iterators and arrays, copies of what they made."""

import itertools

import numpy as np
import pytest

import bert_packed

# seqpacker 0.1.3: `pack_sequences(OF_SEQPACKER, capacity=1024).bins`, as its page on PyPI prints it
OF_SEQPACKER = [1000, 800, 600, 500, 400, 300, 200, 100]
SEQPACKER = [[0], [1, 7], [2, 4], [3, 5, 6]]
# axolotl 0.19: `list(MultipackBatchSampler(SequentialSampler(lengths), batch_size=2, batch_max_len=8,
# lengths=lengths, bin_size=8, drop_last=False))` of these lengths
OF_AXOLOTL = [3, 5, 2, 6, 4]
AXOLOTL = [[[0, 1], [2, 3]], [[4]]]
# TRL 1.16: `pack_dataset(dataset, seq_length=8, strategy="bfd")[:]`; the column `number` is ours
OF_TRL = [3, 5, 2, 6]
TRL = {
    "number": [[3, 3, 3, 3, 3, 3, 2, 2], [1, 1, 1, 1, 1, 0, 0, 0]],
    "seq_lengths": [[6, 2], [5, 3]],
}
# grain 0.2.18: `FirstFitPackIterDataset(dataset, length_struct={"input_ids": 8, "number": 8},
# num_packing_bins=2)`: rows of `number`, which is ours, `number_positions` and `number_segment_ids`
OF_GRAIN = [3, 5, 2, 6, 4]
GRAIN = np.array(
    [
        [[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 2, 0, 1, 2, 3, 4], [1, 1, 1, 2, 2, 2, 2, 2]],
        [[2, 2, 3, 3, 3, 3, 3, 3], [0, 1, 0, 1, 2, 3, 4, 5], [1, 1, 2, 2, 2, 2, 2, 2]],
        [[4, 4, 4, 4, 0, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]],
    ]
)


@pytest.mark.parametrize(
    ("packs", "lengths", "max_seq_length", "num_packs"),
    [
        (SEQPACKER, OF_SEQPACKER, 1024, 4),
        (itertools.chain.from_iterable(AXOLOTL), OF_AXOLOTL, 8, 3),
        (
            [
                np.array(row)[np.cumsum(sizes) - 1]
                for row, sizes in zip(TRL["number"], TRL["seq_lengths"], strict=True)
            ],
            OF_TRL,
            8,
            2,
        ),
        ([number[(position == 0) & (segment > 0)] for number, position, segment in GRAIN], OF_GRAIN, 8, 3),
    ],
    ids=["seqpacker", "axolotl", "TRL", "grain"],
)
def test_packs_of_others_are_verified(packs, lengths, max_seq_length, num_packs):
    found = bert_packed.verify_plan(packs, lengths, max_seq_length)
    assert found.num_packs == num_packs == found.certificate.lower_bound
