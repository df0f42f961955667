"""Each ablation breaks what it names and nothing else, and is off by default."""

import dataclasses

import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import CONFIG, make_engine, to_floats, write_data

from bert_packed.architectures.bert.config import ModelConfig
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import ABLATIONS, PRETRAINING, ablate, ablations
from bert_packed.core.settings import InputError
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.runs.pretraining_data import check_fits, read_data

SINGLE = [name for name, fields in ABLATIONS.items() if len(fields) == 1]


@pytest.fixture(scope="module")
def batches():
    return packed_and_unpacked()


def largest_differences(config, batches):
    """Per sequence in the pack, by slot: how far packed hidden states are from unpacked ones."""
    model = build_model(PRETRAINING, config, seed=1)
    together, alone = (np.asarray(model.encode(batch)) for batch in batches)
    result, new = {}, 0
    for row in range(5):
        for slot in range(1, int(batches[0]["sequence_ids"][row].max()) + 1):
            one = together[row][batches[0]["sequence_ids"][row] == slot]
            result[row, slot] = np.abs(one - alone[new][: len(one)]).max()
            new += 1
    assert len(result) == 11
    return result


def test_none_is_the_default_and_separator_only_is_all_three():
    assert ablations(ModelConfig()) == [] and ablate(CONFIG, "") == CONFIG
    assert PretrainingConfig(input_file="x", output_dir="y").ablation == ""
    assert ablations(ablate(CONFIG, "separator_only")) == SINGLE
    assert ablate(CONFIG, ",".join(SINGLE)) == ablate(CONFIG, "separator_only")


def test_without_mask_neighbours_are_seen(batches):
    found = largest_differences(ablate(CONFIG, "no_attention_mask"), batches)
    assert all((size > 1e-3) == (row in (0, 1, 3)) for (row, _), size in found.items())


def test_without_reset_only_later_sequences_move(batches):
    found = largest_differences(ablate(CONFIG, "no_position_reset"), batches)
    assert all((size > 1e-3) == (slot > 1) for (_, slot), size in found.items())


@pytest.mark.usefixtures("uncompiled")
def test_without_next_sentence_its_head_does_not_learn(batches):
    want = to_floats(make_engine().eval_step(batches[0]))
    engine = make_engine()
    engine.objective = pretraining_objective("per_sequence", next_sentence=False)
    gradients, got = engine.gradients(batches[0])
    assert float(got["nsp_loss"]) == 0 and float(got["mlm_loss"]) == pytest.approx(want["mlm_loss"])
    for variable, gradient in zip(engine.model.trainable_variables, gradients, strict=True):
        is_elsewhere = not variable.path.startswith("pretraining/next_sentence")
        assert np.any(np.asarray(gradient)) == is_elsewhere, variable


def test_without_reset_a_whole_pack_needs_positions(tmp_path):
    short = dataclasses.replace(ablate(CONFIG, "no_position_reset"), max_position_embeddings=23)
    files = ",".join(write_data(tmp_path))
    config = PretrainingConfig(input_file=files, output_dir=str(tmp_path / "run"))
    with pytest.raises(InputError, match=r"max_position_embeddings=23 of .*\. Received: 24"):
        check_fits(read_data(config), short, config)
