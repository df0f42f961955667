"""Synthetic sequences of real lengths: a corpus with its plan, batches, and files of records.

Tokens are random: what a step, a packing job or a read costs depends on none of them.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack, n sequences.
"""

import dataclasses
import os

import numpy as np

from bert_packed import schema
from bert_packed.architectures.registry import MASKED_LM, PRETRAINING
from bert_packed.assembly.assignment import Packs
from bert_packed.assembly.record_kinds import assemble_packs
from bert_packed.core.settings import InputError
from bert_packed.packing.algorithms import ALGORITHMS, DEFAULT_ALGORITHM
from bert_packed.packing.histogram import load_known_histogram
from bert_packed.packing.plan import PackingPlan
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.records.sequences import BERT_LAYOUT, make_sequences, range_indices, to_offsets

WIKIPEDIA = "wikipedia_512"  # the papers' histogram
MASKED_LM_PROB = 0.15  # google-research/bert's
VOCAB_SIZE = 30522
FIRST_WORD = 999  # below are the special tokens of BERT's vocabulary
FEWEST_TOKENS = 12  # of a sequence in files of records
RECORDS_AT_ONCE = 2048


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Lengths of a data set, int64 `[S]`, entry i for i + 1 tokens, and the plan that packs all of it."""

    histogram: np.ndarray
    plan: PackingPlan

    def draw_packs(self, num_packs, rng):
        """Packs, each as often as the plan has it: list of tuples of lengths."""
        strategies, counts = zip(*self.plan.strategies.items(), strict=True)
        shares = np.array(counts) / sum(counts)
        return [strategies[index] for index in rng.choice(len(strategies), num_packs, p=shares)]

    def packed_batch(self, num_packs, vocab_size, rng, head=PRETRAINING):
        """A batch dict of packs for pre-training with a head, P and K as large as the fullest pack needs."""
        spec = spec_of(self.plan.strategies, len(self.histogram))
        return BATCH_MAKERS[head](self.draw_packs(num_packs, rng), spec, vocab_size, rng)

    def unpacked_batch(self, num_rows, vocab_size, rng, head=PRETRAINING):
        """A batch dict of rows of S tokens that hold one sequence each."""
        rows = [(int(one),) for one in draw_lengths(self.histogram, num_rows, rng)]
        return BATCH_MAKERS[head](rows, row_spec(len(self.histogram)), vocab_size, rng)


def plan_corpus(histogram, depth):
    """Plan sequences of at most S tokens, a histogram int64 `[S]`, at a depth: `Corpus`."""
    return Corpus(histogram, ALGORITHMS[DEFAULT_ALGORITHM](histogram, len(histogram), depth))


def describe_corpus(corpus):
    """The data as a whole: a row of a table."""
    plan = corpus.plan
    return {
        "sequences": plan.num_sequences,
        "packs": plan.num_packs,
        "depth": plan.depth,
        "efficiency, %": 100 * plan.efficiency,
        "packing factor": plan.packing_factor,
    }


def sums_of_a_row(corpus, is_packed, head=PRETRAINING):
    """Means of a row of all the data, for `count_flops` of a model with a head."""
    # Means over the few batches that are timed would differ
    lengths = np.arange(1, len(corpus.histogram) + 1)
    values = {
        "num_tokens": lengths,
        "num_pairs": lengths**2,
        "num_predictions": lengths - 1
        if head == schema.CAUSAL_LM
        else count_predictions(lengths, len(lengths)),
        "num_sequences": np.ones(len(lengths)),
    }
    num_rows = corpus.plan.num_packs if is_packed else corpus.plan.num_sequences
    return {name: float(of_length @ corpus.histogram) / num_rows for name, of_length in values.items()}


def wikipedia_histogram(max_seq_length):
    """The papers' Wikipedia lengths in proportion to S, of `FEWEST_TOKENS` at least: int64 `[S]`."""
    counts = load_known_histogram(WIKIPEDIA)
    # Lengths are rounded up, so that the longest stay the longest
    lengths = -(-np.arange(1, len(counts) + 1) * max_seq_length // len(counts))
    lengths = np.maximum(lengths, min(FEWEST_TOKENS, max_seq_length))
    return np.bincount(lengths, counts, max_seq_length + 1)[1:].astype(np.int64)


def wikipedia_corpus(max_seq_length, depth=3):
    """`wikipedia_histogram` and its plan at a depth: `Corpus`."""
    return plan_corpus(wikipedia_histogram(max_seq_length), depth)


def draw_lengths(histogram, num_sequences, rng):
    """Lengths, each as often as a histogram `[S]` has it: int64 `[num_sequences]`."""
    return 1 + rng.choice(len(histogram), num_sequences, p=histogram / histogram.sum())


def check_positions(length, model_config):
    """Raise `InputError` where a model has fewer positions than packs have tokens."""
    limit = model_config.max_position_embeddings
    if limit is not None and length > limit:  # None for a Mamba, which takes any length
        raise InputError(
            f"`max_seq_length` must be at most max_position_embeddings={limit}. Received: {length}."
        )


def count_predictions(lengths, max_seq_length):
    """Predictions of sequences, as google-research/bert chooses their number: int64 `[n]`.

    lengths 3 20 512, S = 512   ->   1 3 76
    """
    wanted = np.round(np.asarray(lengths) * MASKED_LM_PROB).astype(np.int64)
    return np.clip(wanted, 1, schema.default_predictions(max_seq_length))


def spec_of(packs, max_seq_length):
    """The least shapes that hold packs, tuples of lengths: `PackSpec`."""
    needed = max(int(count_predictions(pack, max_seq_length).sum()) for pack in packs)
    return schema.PackSpec(max_seq_length, max(map(len, packs)), needed)


def row_spec(max_seq_length):
    """The shapes of rows that hold one sequence each: `PackSpec`."""
    return schema.PackSpec(max_seq_length, 1, schema.default_predictions(max_seq_length))


def random_packs(packs, spec, vocab_size, rng):
    """The arrays of packed records: dict from feature to int32 `[B, ...]`, weights float32.

    Args:
        packs: List of tuples of lengths; `[(5,), (7,)]` are two rows of one sequence each.
        spec: `PackSpec` that no pack exceeds.
        vocab_size: Number that ids are below.
        rng: NumPy generator.
    """
    lengths = np.array([length for pack in packs for length in pack])
    num_predictions = count_predictions(lengths, spec.max_seq_length)
    offsets, num_tokens = to_offsets(lengths), int(lengths.sum())
    first_id = min(FIRST_WORD, vocab_size - 1)
    # The second half of each sequence is its second segment
    is_b = np.arange(num_tokens) >= np.repeat(offsets[:-1] + lengths // 2, lengths)
    number = range_indices(0, num_predictions)
    # Predictions are spread evenly in each sequence: lengths 4 and 6, one and two of them -> 0 0 3
    positions = number * np.repeat(lengths, num_predictions) // np.repeat(num_predictions, num_predictions)
    sequences = make_sequences(
        BERT_LAYOUT,
        "",
        tokens=rng.integers(first_id, vocab_size, num_tokens),
        token_type_ids=is_b,
        lengths=lengths,
        prediction_positions=positions,
        prediction_ids=rng.integers(first_id, vocab_size, len(positions)),
        num_predictions=num_predictions,
        next_sentence_labels=rng.integers(0, 2, len(lengths)),
        record_numbers=np.arange(1, len(lengths) + 1),
    )
    members = Packs(np.arange(len(lengths)), to_offsets(np.array([len(pack) for pack in packs])))
    return assemble_packs(sequences, members, spec)


def row_batch(lengths, max_seq_length, vocab_size, rng):
    """The batch dict of pre-training a BERT on rows of S tokens that hold one sequence each."""
    return bert_batch([(int(one),) for one in lengths], row_spec(max_seq_length), vocab_size, rng)


def bert_batch(packs, spec, vocab_size, rng):
    """The batch dict of pre-training a BERT on packs; arguments as in `random_packs`."""
    from bert_packed.objectives.features import BATCH_NAMES

    arrays = random_packs(packs, spec, vocab_size, rng)
    return {name: arrays[record_name] for record_name, name in BATCH_NAMES.items()}


def token_batch(packs, spec, vocab_size, rng):
    """The batch dict of next-token prediction on packs; arguments as in `random_packs`.

    All tokens of a sequence predict but its last.
    """
    arrays = random_packs(packs, spec, vocab_size, rng)
    tokens_BS, ids_BS = arrays[schema.INPUT_IDS], arrays[schema.INPUT_MASK]
    next_ids_BS, next_tokens_BS = (np.pad(values[:, 1:], ((0, 0), (0, 1))) for values in (ids_BS, tokens_BS))
    # The last token of each sequence, whose next one is padding or another sequence's, has no label
    goes_on_BS = (next_ids_BS == ids_BS) & (ids_BS > 0)
    slots_K = np.arange(1, spec.max_sequences_per_pack + 1)
    return {
        "token_ids": tokens_BS,
        "sequence_ids": ids_BS,
        "position_ids": arrays[schema.POSITION_IDS],
        "label_ids": next_tokens_BS * goes_on_BS,
        "label_sequences": ids_BS * goes_on_BS,
        "slot_weights": arrays[schema.NEXT_SENTENCE_WEIGHTS],
        "sequence_bytes": (ids_BS[:, :, None] == slots_K).sum(axis=1).astype(np.int32),  # a byte a token
    }


# Keys are heads that a model is pre-trained with
BATCH_MAKERS = {PRETRAINING: bert_batch, MASKED_LM: bert_batch, schema.CAUSAL_LM: token_batch}


def best_shapes(lengths, num_shapes):
    """The few row lengths that sequences are filled up to with the least padding in all: int64, ascending.

    lengths [2 3 9 10 10], two shapes   ->   [3 10]
    """
    values, counts = np.unique(lengths, return_counts=True)
    upto = np.concatenate([[0], np.cumsum(counts)])
    # cost[i] is the least tokens of the i shortest values' sequences, with a shape more in each round
    cost, chosen = np.where(np.arange(len(values) + 1) == 0, 0.0, np.inf), []
    for _ in range(num_shapes):
        # [i, j] is for a last shape of value j - 1, which holds the values from i on
        tokens = cost[:, None] + (upto[None, :] - upto[:, None]) * np.concatenate([[0], values])[None, :]
        tokens = np.where(np.tri(len(cost), dtype=bool).T, tokens, np.inf)
        chosen.append(np.argmin(tokens, axis=0))
        cost = np.min(tokens, axis=0)
    shapes, last = [], len(values)
    for first in reversed(chosen):
        if last:
            shapes.append(values[last - 1])
        last = first[last]
    return np.unique(shapes)


def write_sequences(folder, num_sequences, max_seq_length, num_files=4, seed=0):
    """Write unpacked records with Wikipedia's lengths in proportion to S into a folder; returns the paths."""
    os.makedirs(folder, exist_ok=True)
    paths = []
    for index in range(num_files):
        rng = np.random.default_rng((seed, index))
        count = num_sequences * (index + 1) // num_files - num_sequences * index // num_files
        paths.append(os.path.join(folder, f"sequences-{index:05d}-of-{num_files:05d}.tfrecord"))
        tfrecords.write_records(paths[-1], _unpacked_records(rng, count, max_seq_length))
    return paths


def _unpacked_records(rng, num_sequences, max_seq_length):
    histogram = wikipedia_histogram(max_seq_length)
    for start in range(0, num_sequences, RECORDS_AT_ONCE):
        size = min(RECORDS_AT_ONCE, num_sequences - start)
        packs = [(length,) for length in draw_lengths(histogram, size, rng)]
        arrays = random_packs(packs, row_spec(max_seq_length), VOCAB_SIZE, rng)
        # A pack of one sequence has the arrays of an unpacked record, and three more
        yield from serialize_examples({name: arrays[name] for name in schema.UNPACKED_LENGTHS})
