"""Small packs for next-token prediction, built by a plain loop, and tiny Mambas that learn from them.

Legend: B packs per batch, S pack length, K sequences per pack.
"""

import numpy as np

from bert_packed.architectures.mamba.config import MambaConfig
from bert_packed.architectures.mamba2.config import Mamba2Config
from bert_packed.objectives.features import NEXT_TOKENS
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples

VOCAB_SIZE = 31
CONFIG = MambaConfig(
    vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=2, state_size=4, time_step_rank=3
)
# A group has two heads, and a pack three chunks
MAMBA2 = Mamba2Config(
    vocab_size=VOCAB_SIZE,
    hidden_size=16,
    num_hidden_layers=2,
    state_size=4,
    head_dim=8,
    n_groups=2,
    chunk_size=4,
)
# There are single tokens, sequences shorter than the four taps, a full pack, and padding behind some
LENGTHS = [[5, 1, 2, 4], [3, 3], [12], [1, 1, 9], [7]]


def batch_of(packs, max_seq_length, num_slots):
    """The batch dict of packs: lists of sequences, each a list of tokens that predict the next."""
    names = ("token_ids", "sequence_ids", "position_ids", "label_ids", "label_sequences")
    batch = {name: np.zeros((len(packs), max_seq_length), np.int32) for name in names}
    batch["slot_weights"] = np.zeros((len(packs), num_slots), np.float32)
    batch["sequence_bytes"] = np.zeros((len(packs), num_slots), np.int32)
    for row, pack in enumerate(packs):
        start = 0
        for slot, tokens in enumerate(pack):
            for offset, token in enumerate(tokens):
                place = row, start + offset
                batch["token_ids"][place] = token
                batch["sequence_ids"][place] = slot + 1
                batch["position_ids"][place] = offset
                if offset + 1 < len(tokens):
                    batch["label_ids"][place] = tokens[offset + 1]
                    batch["label_sequences"][place] = slot + 1
            batch["slot_weights"][row, slot] = 1
            batch["sequence_bytes"][row, slot] = 3 * len(tokens) + slot
            start += len(tokens)
    return batch


def random_packs(lengths=LENGTHS, seed=0):
    """Packs of random tokens."""
    rng = np.random.default_rng(seed)
    return [[rng.integers(1, VOCAB_SIZE, length).tolist() for length in pack] for pack in lengths]


def packed_and_unpacked(lengths=LENGTHS, max_seq_length=12):
    """Two batches of the same sequences: packs of up to four, and one sequence a pack."""
    packs = random_packs(lengths)
    alone = [[sequence] for pack in packs for sequence in pack]
    return batch_of(packs, max_seq_length, 4), batch_of(alone, max_seq_length, 4)


def make_engine(weighting="per_token", config=CONFIG, seed=1, build=None, **engine):
    """An engine around a new tiny model; `build` has further arguments of `build_mamba`."""
    # The import is here, so that tests without Keras can write files
    from bert_packed.objectives.pretraining import next_token_objective
    from bert_packed.training import engines

    objective = next_token_objective(weighting)
    return engines.make_engine(objective.build_model(config, seed, **(build or {})), objective, **engine)


def write_packs(path, batch):
    """Write a batch's packs as records."""
    features = {one.record_name: batch[one.name] for one in NEXT_TOKENS}
    tfrecords.write_records(path, serialize_examples(features))
