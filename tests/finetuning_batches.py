"""Small fine-tuning batches for tests: the same sequences packed and unpacked, labels drawn at random."""

import numpy as np
from packs import batch_of, random_sequence

from bert_packed.tasks.classify.losses import classes_objective, numbers_objective, several_objective
from bert_packed.tasks.ner.task import tags_objective
from bert_packed.tasks.squad.task import answers_objective

LENGTHS = [[3, 9, 4, 8], [5, 6, 10], [20], [2, 17], [1]]
MAX_SEQ_LENGTH, NUM_SLOTS = 24, 4
WEIGHTS = np.array([0.5, 2, 1], np.float32)
LABELS = {"numbers": "scores", "several": "bits"}  # in the batches; others have "labels"
KINDS = {
    "answers": answers_objective(),
    "classes": classes_objective(3),
    "weighted": classes_objective(3, WEIGHTS),
    "several": several_objective(3),
    "numbers": numbers_objective(),
    "tags": tags_objective(3),
}
# These add the same to every logit of a sequence, which moves no softmax: their true gradient is 0
SHIFTS = (
    "key/bias",
    "question_answering/output/bias",
    "question_answering/classifier/bias",
    "layer_1/feed_forward/LayerNorm/beta",
)


def packed_and_unpacked(seed=0, max_seq_length=MAX_SEQ_LENGTH):
    """Two batches of eleven sequences with positions of answers, `labels`, `bits`, `scores` and tags.

    Tags are `prediction_ids`, 0 to 2, of one to six tokens of a sequence.
    """
    rng = np.random.default_rng(seed)
    packs, targets = [], []
    for lengths in LENGTHS:
        packs.append([random_sequence(rng, length) for length in lengths])
        targets.append(
            [
                (*sorted(rng.integers(0, length, 2).tolist()), int(rng.integers(3)), float(rng.normal()))
                for length in lengths
            ]
        )
    single = [[sequence] for pack in packs for sequence in pack]
    single_targets = [[target] for pack in targets for target in pack]
    packed = _batch(packs, targets, NUM_SLOTS, max_seq_length)
    return packed, _batch(single, single_targets, 1, max_seq_length)


def _batch(packs, targets, num_slots, max_seq_length):
    batch = batch_of(packs, max_seq_length, num_slots, num_predictions=12)
    shape = (len(packs), num_slots)
    found = {
        "start_positions": np.zeros(shape, np.int32),
        "end_positions": np.zeros(shape, np.int32),
        "labels": np.zeros(shape, np.int32),
        "bits": np.zeros((*shape, 3), np.float32),
        "scores": np.zeros(shape, np.float32),
    }
    for row, pack in enumerate(targets):
        for slot, (start, end, label, score) in enumerate(pack):
            first = batch["cls_positions"][row, slot]
            found["start_positions"][row, slot] = first + start
            found["end_positions"][row, slot] = first + end
            found["labels"][row, slot] = label
            found["bits"][row, slot] = label == 0, label == 1, score > 0
            found["scores"][row, slot] = score
    names = ("token_ids", "sequence_ids", "token_type_ids", "position_ids", "cls_positions", "slot_weights")
    tags = {name: batch[name] for name in ("prediction_positions", "prediction_sequences")}
    tags["prediction_ids"] = batch["prediction_ids"] % 3
    return {**{name: batch[name] for name in names}, **tags, **found}
