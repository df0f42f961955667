"""Mistakes in the options, the sequences and the data sets of a collator: one line, which names the place.

This file alone catches a rule of what users give that the collator no longer checks.
"""

import math
import re

import pytest
from reference import import_trainer

torch, _, datasets = import_trainer()

from bert_packed.torch import PackingCollator, pack_dataset  # noqa: E402  after the skips above

LENGTH = 24


class WithMask:
    """A tokenizer, as far as mistakes need one."""

    pad_token_id, mask_token_id, all_special_ids = 0, 4, [0, 1, 2, 3, 4]

    def __len__(self):
        return 60


class WithoutMask:
    """A tokenizer of a causal model."""

    pad_token_id = mask_token_id = None


def make(options):
    return PackingCollator(**{"tokenizer": WithMask(), "max_seq_length": LENGTH, **options})


def call(examples):
    return make({})(examples)


def collate_labels(labels):
    return make({"mlm_probability": None})([{"input_ids": [5, 6], "labels": labels}])


def collate_of_sequences(labels):
    examples = [{"input_ids": [5, 6, 7], "labels": one} for one in labels]
    return make({"labels": "sequence"})(examples)


def collate_of_tokens(label):
    return make({"labels": "token"})([{"input_ids": [5, 6, 7], "labels": label}])


def pack(columns):
    return pack_dataset(datasets.Dataset.from_dict(columns), LENGTH)


def pack_labels(labels):
    return pack_dataset(
        datasets.Dataset.from_dict({"input_ids": [[5]], "labels": [0]}), LENGTH, labels=labels
    )


def pack_other(dataset):
    return pack_dataset(dataset, LENGTH)


def whole(name):
    return f"`{name}` must be a whole number from 0. Received: "


PACKED = {"input_ids": [5, 6], "position_ids": [0, 1]}
RUNS, RESTARTS = [1] * 10 + [2] * 10 + [0] * 4, [*range(10), *range(10), 0, 0, 0, 0]
ROW = {"input_ids": [5] * LENGTH, "sequence_ids": RUNS, "position_ids": RESTARTS}
PROBABILITY = "`mlm_probability` must be a number from 0 to 1, or None. Received: "
ATTENTION = "`attention` must be one of mask, positions, varlen. Received: "
NO_MASK = "`tokenizer` must have a mask token, unless mlm_probability=None. Received: WithoutMask."
DICT = "sequence 0 must be a dict with input_ids. Received: "
REMOVED = "rows of `pack_dataset` must have sequence_ids; for Trainer remove_unused_columns=False."
COUNTS = "token 10: position_ids must count from 0 in each of sequence_ids. Received: "
ONE_RUN = "token 20: sequence_ids must be 1, 2, ..., each in one run, and 0 in padding, which stands last."
MASK = "attention_mask must be 1 where sequence_ids are above 0, and 0 elsewhere."
NUMBERS = "must have max_seq_length=24 numbers. Received: "
KIND = "`examples`: kind must be numbers, equally many in each row. Received: [[1], [1, 2]]."
LABELS = "labels must be whole numbers, one for each token"
OF_TOKENS = "labels must be whole numbers, one for each token. Received: "
CHOICES = "`labels` must be one of sequence, token. Received: "
OPTIONS = "`labels` must be None with other options than the limits of packs: `enable_packing` sets them."
OF_SEQUENCES = "sequence 1: labels must be a number, or a list of one for each label. Received: "
FINITE = "sequence 1: labels must be finite, and not -100, which Trainer does not count. Received: "
DATASET = "`dataset` must be a datasets.Dataset. Received: "

MISTAKES = [
    *((make, {"mlm_probability": one}, f"{PROBABILITY}{one!r}.") for one in (1.5, "0.3", True, math.nan, [])),
    (make, {"tokenizer": None}, "`tokenizer` must be one of transformers. Received: None."),
    (make, {"tokenizer": WithoutMask()}, NO_MASK),
    *((make, {"attention": one}, f"{ATTENTION}{one!r}.") for one in ([], "flash")),
    (make, {"attention": "positions"}, "must be mask or varlen, unless mlm_probability=None."),
    (make, {"attention": "varlen", "sliding_window": 2}, "`sliding_window` must be None, unless attention="),
    (make, {"model": 5}, "`model` must be one of transformers. Received: 5."),
    (make, {"sliding_window": 2.5}, f"{whole('sliding_window')}2.5."),
    (make, {"first_position": -1}, f"{whole('first_position')}-1."),
    (make, {"seed": "one"}, f"{whole('seed')}'one'."),
    (make, {"mlm_probability": None, "per_sequence": True}, "`per_sequence` must be False for causal models"),
    (make, {"dtype": torch.int32}, "`dtype` must be a floating type of torch. Received: torch.int32."),
    (make, {"max_seq_length": 0}, "`max_seq_length` must be a whole number from 1"),
    (call, [{"input_ids": [5] * 30}], "sequence 0 must have at most max_seq_length=24 tokens. Received: 30."),
    (call, [], "`examples` must hold one sequence or more. Received: none."),
    (call, [{"labels": [5]}], f"{DICT}labels."),
    (call, [[5, 6]], f"{DICT}[5, 6]."),
    (call, [{"input_ids": [5]}, {"input_ids": [5], "kind": 1}], "sequence 1 must have the columns input_ids"),
    (call, [{"input_ids": [5], "labels": [5]}], "`examples` must be without labels, which masking makes;"),
    (call, [PACKED], REMOVED),
    (call, [PACKED | {"sequence_ids": [1, 1], "sequence_index": [0]}], f"row 0: input_ids {NUMBERS}[5, 6]."),
    (call, None, "`examples` must be a list of dicts. Received: None."),
    (call, [ROW, ROW | {"position_ids": [*range(LENGTH)]}], f"row 1, {COUNTS}10."),
    (call, [ROW | {"sequence_ids": [1] * LENGTH}], f"row 0, {COUNTS}0."),
    (call, [ROW | {"sequence_ids": [1] * 10 + [2] * 10 + [1] * 4}], f"{ONE_RUN} Received: 1."),
    (call, [ROW | {"sequence_ids": [1] * 10 + [0] * 10 + [1] * 4}], f"{ONE_RUN} Received: 1."),
    (call, [ROW | {"sequence_ids": [1.0] * 23 + [math.nan]}], "token 23: sequence_ids must be an integer"),
    (call, [ROW | {"position_ids": [0.0] * LENGTH}], "row 0, token 0: position_ids must be an integer"),
    (call, [ROW, ROW | {"position_ids": [0, 1]}], f"row 1: position_ids {NUMBERS}[0, 1]."),
    (call, [ROW | {"attention_mask": RUNS}], f"row 0, token 10: {MASK}"),
    (call, [ROW | {"kind": [1]}, ROW | {"kind": [1, 2]}], KIND),
    *((collate_labels, label, LABELS) for label in (1, [0.5, 0.5])),
    (pack_labels, "tokens", f"{CHOICES}'tokens'."),
    (make, {"labels": "tokens"}, f"{CHOICES}'tokens'."),
    (make, {"labels": "token", "seed": 0}, OPTIONS),
    (make, {"labels": "token", "first_position": 1}, OPTIONS),
    (make, {"labels": "token", "mlm_probability": 0.15}, OPTIONS),
    (make, {"labels": "token", "attention": "varlen"}, OPTIONS),
    (collate_of_sequences, [1, [0, 1]], "sequence 1: labels must be a number, as in sequence 0."),
    (collate_of_sequences, [[0, 1, 1], [0, 1]], "sequence 1: labels must be a list of 3, as in sequence 0."),
    (collate_of_sequences, [1, "two"], OF_SEQUENCES),
    (collate_of_sequences, [1, None], OF_SEQUENCES),
    (collate_of_sequences, [1.5, -100], FINITE),
    (collate_of_sequences, [1.5, math.nan], FINITE),
    (collate_of_tokens, 1, f"sequence 0: {OF_TOKENS}1."),
    (collate_of_tokens, [0.5, 1.0, 2.0], f"sequence 0: {OF_TOKENS}[0.5, 1.0, 2.0]."),
    (collate_of_tokens, [[1], [2], [3]], f"sequence 0: {OF_TOKENS}[[1], [2], [3]]."),
    (collate_of_tokens, [1, 2], "sequence 0: labels must have a value for each of its 3 tokens"),
    (
        make({"labels": "sequence"}),
        [ROW | {"labels": [1]}],
        "row 0: labels must have a label for each of its",
    ),
    (make({"labels": "token"}), [ROW | {"labels": [1, 2]}], f"row 0: {OF_TOKENS}[1, 2]."),
    (pack, {"text": [[5]]}, "`sequences` must have a column input_ids. Received: text."),
    (pack, {"input_ids": [[5]], "text": ["five"]}, "sequence 0: text must be a list of numbers, or one."),
    *((pack_other, one, DATASET) for one in ([{"input_ids": [5]}], datasets.DatasetDict())),
]


@pytest.mark.parametrize(("function", "given", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_its_place(function, given, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        function(given)
    assert "\n" not in str(error.value)
