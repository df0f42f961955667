"""Mistakes in the options, the sequences and the data sets of a collator: one line, which names the place.

This file alone catches a rule of what users give that the collator no longer checks.
"""

import math
import re

import pytest
from reference import import_reference

torch, _ = import_reference()
datasets = pytest.importorskip("datasets", reason="pip install -e '.[torch]'")

from bert_packed.core.settings import InputError  # noqa: E402  after the skips where a package is missing
from bert_packed.torch import PackingCollator, pack_dataset  # noqa: E402

LENGTH = 24


class WithMask:
    """A tokenizer, as far as mistakes need one."""

    pad_token_id, mask_token_id, all_special_ids = 0, 4, [0, 1, 2, 3, 4]

    def __len__(self):
        return 60


@pytest.fixture
def tokenizer():
    return WithMask()


class WithoutMask:
    """A tokenizer of a causal model."""

    pad_token_id = mask_token_id = None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mlm_probability": 1.5}, "`mlm_probability` must be a number from 0 to 1, or None. Received: 1.5."),
        ({"mlm_probability": "0.3"}, "or None. Received: '0.3'."),
        ({"mlm_probability": True}, "or None. Received: True."),
        ({"mlm_probability": math.nan}, "or None. Received: nan."),
        ({"mlm_probability": []}, "or None. Received: []."),
        ({"tokenizer": None}, "`tokenizer` must be one of transformers. Received: None."),
        ({"attention": []}, "`attention` must be one of mask, positions, varlen. Received: []."),
        (
            {"tokenizer": WithoutMask()},
            "`tokenizer` must have a mask token, unless mlm_probability=None. Received: WithoutMask.",
        ),
        ({"attention": "flash"}, "must be one of mask, positions, varlen. Received: 'flash'."),
        ({"attention": "positions"}, "must be mask or varlen, unless mlm_probability=None."),
        ({"attention": "varlen", "sliding_window": 2}, "`sliding_window` must be None, unless masked"),
        ({"sliding_window": 2.5}, "`sliding_window` must be a whole number from 0. Received: 2.5."),
        ({"first_position": -1}, "`first_position` must be a whole number from 0. Received: -1."),
        ({"seed": "one"}, "`seed` must be a whole number from 0. Received: 'one'."),
        ({"mlm_probability": None, "per_sequence": True}, "`per_sequence` must be False for causal models."),
        ({"dtype": torch.int32}, "`dtype` must be a floating type of torch. Received: torch.int32."),
        ({"max_seq_length": 0}, "`max_seq_length` must be a whole number from 1"),
    ],
)
def test_wrong_options(tokenizer, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PackingCollator(**{"tokenizer": tokenizer, "max_seq_length": LENGTH, **options})


PACKED = {"input_ids": [5, 6], "position_ids": [0, 1]}
RUNS, RESTARTS = [1] * 10 + [2] * 10 + [0] * 4, [*range(10), *range(10), 0, 0, 0, 0]
ROW = {"input_ids": [5] * LENGTH, "sequence_ids": RUNS, "position_ids": RESTARTS}
ONE_RUN = "be 1, 2, ..., each in one run, and 0 in padding, which stands last"


@pytest.mark.parametrize(
    "examples, message",
    [
        ([{"input_ids": [5] * 30}], "sequence 0 must have at most max_seq_length=24 tokens. Received: 30."),
        ([], "`examples` must hold one sequence or more. Received: none."),
        ([{"labels": [5]}], "sequence 0 must be a dict with input_ids. Received: labels."),
        ([[5, 6]], "sequence 0 must be a dict with input_ids. Received: [5, 6]."),
        (
            [{"input_ids": [5]}, {"input_ids": [5], "kind": 1}],
            "sequence 1 must have the columns input_ids. Received: input_ids, kind.",
        ),
        ([{"input_ids": [5], "labels": [5]}], "`examples` must be without labels, which masking makes."),
        ([PACKED], "rows of `pack_dataset` must have sequence_ids; for Trainer remove_unused_columns=False."),
        (
            [PACKED | {"sequence_ids": [1, 1], "sequence_index": [0]}],
            "row 0: input_ids must have max_seq_length=24 numbers. Received: [5, 6].",
        ),
        (None, "`examples` must be a list of dicts. Received: None."),
        (
            [{"input_ids": [5, 6, 7, 8], "attention_mask": [1, 1, 2, 2]}],
            "sequence 0: attention_mask must be 1 at every token, since a sequence is one and without",
        ),
        (
            [ROW, ROW | {"position_ids": list(range(LENGTH))}],
            "row 1, token 10: position_ids must count from 0 in each of sequence_ids. Received: 10.",
        ),
        (
            [ROW | {"sequence_ids": [1] * LENGTH}],
            "row 0, token 10: position_ids must count from 0 in each of sequence_ids. Received: 0.",
        ),
        (
            [ROW | {"sequence_ids": [1] * 10 + [2] * 10 + [1] * 4}],
            f"row 0, token 20: sequence_ids must {ONE_RUN}. Received: 1.",
        ),
        (
            [ROW | {"sequence_ids": [1] * 10 + [0] * 10 + [1] * 4}],
            f"row 0, token 20: sequence_ids must {ONE_RUN}. Received: 1.",
        ),
        (
            [ROW | {"sequence_ids": [1.0] * 23 + [math.nan]}],
            "row 0, token 23: sequence_ids must be an integer. Received: nan.",
        ),
        (
            [ROW | {"position_ids": [float(position) for position in RESTARTS]}],
            "row 0, token 0: position_ids must be an integer. Received: 0.0.",
        ),
        (
            [ROW, ROW | {"position_ids": [0, 1]}],
            "row 1: position_ids must have max_seq_length=24 numbers. Received: [0, 1].",
        ),
        (
            [ROW | {"attention_mask": RUNS}],
            "row 0, token 10: attention_mask must be 1 where sequence_ids are above 0, and 0 elsewhere.",
        ),
        (
            [ROW | {"kind": [1]}, ROW | {"kind": [1, 2]}],
            "`examples`: kind must be numbers, equally many in each row. Received: [[1], [1, 2]].",
        ),
    ],
)
def test_wrong_examples(tokenizer, examples, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PackingCollator(tokenizer, LENGTH)(examples)


@pytest.mark.parametrize("label", [1, [0.5, 0.5]])
def test_wrong_labels_of_causal_models(tokenizer, label):
    with pytest.raises(InputError, match="labels must be whole numbers, one for each token"):
        PackingCollator(tokenizer, LENGTH, None)([{"input_ids": [5, 6], "labels": label}])


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"text": [[5]]}, "`sequences` must have a column input_ids. Received: text."),
        ({"input_ids": [[5]], "text": ["five"]}, "sequence 0: text must be a list of numbers, or one."),
        ({"input_ids": [[5], [6] * 30]}, "sequence 1 must have at most max_seq_length=24 tokens."),
    ],
)
def test_wrong_data_sets(columns, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pack_dataset(datasets.Dataset.from_dict(columns), LENGTH)


def test_what_is_no_data_set():
    for wrong in ([{"input_ids": [5]}], datasets.DatasetDict()):
        with pytest.raises(InputError, match=r"`dataset` must be a datasets\.Dataset\. Received: "):
            pack_dataset(wrong, LENGTH)
