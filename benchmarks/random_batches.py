"""Batches of random tokens whose sequences have given lengths: what a step costs depends on no token.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack.
"""

import numpy as np

from benchmarks.synthetic_data import FIRST_WORD
from bert_packed.assembly.assemble import assemble_packs
from bert_packed.assembly.assignment import Packs
from bert_packed.core.settings import InputError
from bert_packed.objectives.features import BATCH_NAMES
from bert_packed.records.sequences import BERT_LAYOUT, make_sequences, range_indices, to_offsets
from bert_packed.schema import PackSpec, default_predictions

MASKED_LM_PROB = 0.15  # google-research/bert's


def count_predictions(lengths, max_seq_length):
    """Predictions of sequences, as google-research/bert chooses how many: int64 `[n]`.

        lengths 3 20 512, S = 512   ->   1 3 76

    Args:
        lengths: Int `[n]`.
        max_seq_length: S, by which their number is limited.
    """
    wanted = np.round(np.asarray(lengths) * MASKED_LM_PROB).astype(np.int64)
    return np.clip(wanted, 1, default_predictions(max_seq_length))


def check_positions(length, model_config):
    """Raise `InputError` where a model has fewer positions than packs have tokens."""
    if length > model_config.max_position_embeddings:
        raise InputError(
            "`max_seq_length` must be at most max_position_embeddings="
            f"{model_config.max_position_embeddings}. Received: {length}."
        )


def spec_of_plan(plan):
    """The shapes of a plan's packs: `PackSpec`, P and K as large as the fullest needs."""
    needed = (int(count_predictions(s, plan.max_seq_length).sum()) for s in plan.strategies)
    return PackSpec(plan.max_seq_length, plan.depth, max(needed))


def spec_of_rows(length, limit):
    """The shapes of rows of one sequence of at most `length` tokens each: `PackSpec`.

    Args:
        length: S of the rows.
        limit: As of `random_batch`: the longest sequence of all rows.
    """
    return PackSpec(int(length), 1, int(count_predictions(np.arange(1, length + 1), limit).max()))


def draw_packs(plan, num_packs, rng):
    """Strategies of a plan, each as often as the plan has it: list of tuples of lengths."""
    strategies, counts = zip(*plan.strategies.items(), strict=True)
    shares = np.array(counts) / sum(counts)
    return [strategies[index] for index in rng.choice(len(strategies), num_packs, p=shares)]


def draw_lengths(histogram, num_sequences, rng):
    """Lengths of sequences, each as often as a histogram `[S]` has it: int64 `[num_sequences]`."""
    return 1 + rng.choice(len(histogram), num_sequences, p=histogram / histogram.sum())


def random_batch(packs, spec, limit, vocab_size, rng):
    """The batch dict of pre-training for packs of given lengths.

    Args:
        packs: List of tuples of lengths; `[(5,), (7,)]` are two rows of one sequence each.
        spec: `PackSpec` that no pack exceeds.
        limit: Length by which the predictions of a sequence are limited (`count_predictions`).
        vocab_size: Ids are below it.
        rng: NumPy generator.

    Returns:
        Dict of arrays `[B, S]`, `[B, P]` and `[B, K]`; int32, weights float32.
    """
    lengths = np.array([length for pack in packs for length in pack])
    num_predictions = count_predictions(lengths, limit)
    offsets, num_tokens = to_offsets(lengths), int(lengths.sum())
    first_id = min(FIRST_WORD, vocab_size - 1)
    sequences = make_sequences(
        BERT_LAYOUT,
        "",
        tokens=rng.integers(first_id, vocab_size, num_tokens),
        token_type_ids=np.arange(num_tokens) >= np.repeat(offsets[:-1] + lengths // 2, lengths),
        lengths=lengths,
        prediction_positions=_spread(lengths, num_predictions),
        prediction_ids=rng.integers(first_id, vocab_size, int(num_predictions.sum())),
        num_predictions=num_predictions,
        next_sentence_labels=rng.integers(0, 2, len(lengths)),
        record_numbers=np.arange(1, len(lengths) + 1),
    )
    members = Packs(np.arange(len(lengths)), to_offsets(np.array([len(pack) for pack in packs])))
    arrays = assemble_packs(sequences, members, spec)
    return {name: arrays[record_name] for record_name, name in BATCH_NAMES.items()}


def _spread(lengths, num_predictions):
    """Places of predictions, evenly in each sequence: lengths [4 6], one and two -> [0 0 3]."""
    number = range_indices(np.zeros(len(lengths), np.int64), num_predictions)
    return (
        number * np.repeat(lengths, num_predictions) // np.repeat(num_predictions, num_predictions)
    ).astype(np.int32)
