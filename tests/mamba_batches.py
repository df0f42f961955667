"""A few sequences one at a time, in padded rows and in packs, and an engine that only takes notes."""

from next_tokens import VOCAB_SIZE

from benchmarks.sequence_batches import PACKED, PADDED, SINGLE, make_batches

PACKS = [(1, 2, 5), (3, 4), (6,), (2, 2, 3)]
WAYS = (SINGLE, PADDED, PACKED)


def tiny_batches():
    """`PACKS` of 8 tokens, two at a time, and rows of 6."""
    return make_batches(PACKS, 8, 6, 2, 3, VOCAB_SIZE)


class RecordingEngine:
    """Stands in for an engine: keeps its config, and the batches that it would have trained on."""

    def __init__(self, config):
        self.batches, self.config = [], config

    def train_step(self, batch):
        self.batches.append(batch)
        return {"num_sequences": 1.0}
