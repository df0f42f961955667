"""The audit's packs show every depth and boundaries in all tiles: leaks that the first packs do not show."""

import numpy as np
import pytest
from packs import VOCAB_SIZE, random_sequence, write_packs

from bert_packed.architectures.bert.config import ModelConfig
from bert_packed.data.batches import CheckedBatches
from bert_packed.data.input_pipeline import chosen_packs, eval_batches
from bert_packed.evaluation import contamination
from bert_packed.evaluation.checkpoint_audit import (
    choose_packs,
    describe_boundaries,
    describe_places,
    show_boundaries,
)
from bert_packed.schema import PackSpec

SPEC = PackSpec(160, 4, 60)
CONFIG = ModelConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=SPEC.max_seq_length)
NUM_PACKS = 8  # the audit's default


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Packs of one or two sequences, the second from 60 to 78 on; in a second file packs cut anywhere."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("packs")
    alike = [[70] if number % 4 == 3 else [60 + 2 * number, 100 - 2 * number] for number in range(10)]
    ends = [np.sort(1 + rng.permutation(SPEC.max_seq_length)[:depth]) for depth in rng.integers(1, 5, 90)]
    mixed = [np.diff(some, prepend=0).tolist() for some in ends]
    paths = []
    for name, lengths in (("alike", alike), ("mixed", mixed)):
        packs = [[random_sequence(rng, length, num_predictions=1) for length in pack] for pack in lengths]
        paths.append(str(folder / f"{name}.tfrecord"))
        write_packs(paths[-1], packs, SPEC.max_seq_length, 4, SPEC.max_predictions_per_pack)
    return paths


def read(packed, files):
    return next(CheckedBatches(packed, files, SPEC, CONFIG))


def choose(files, num_packs=NUM_PACKS):
    index, numbers, missing = choose_packs(files, SPEC, num_packs)
    return read(chosen_packs(index, SPEC, numbers), files), numbers, missing


def change_of_neighbours(batch, leaks):
    """The audit's figure of a model of one block, whose mask lets a token see more than its own sequence."""

    def forward(packs):
        ids_BS, place_S = packs["sequence_ids"], np.arange(SPEC.max_seq_length)
        of_query, of_key = (ids_BS[:, :, None], place_S[:, None]), (ids_BS[:, None], place_S)
        sees_BSS = (of_query[0] == of_key[0]) | leaks(*of_query, *of_key)
        return {contamination.HIDDEN: (sees_BSS @ packs["token_ids"][..., None]).astype(np.float32)}

    change, _ = contamination._neighbours_outputs(forward, {contamination.HIDDEN: "S"}, VOCAB_SIZE, batch)
    return change.largest


@pytest.mark.parametrize(
    "leaks",
    [
        pytest.param(lambda ids, place, of_ids, of_place: (place > 100) & (of_place > 100), id="beyond_100"),
        pytest.param(lambda ids, place, of_ids, of_place: (ids > 2) & (of_ids > 0), id="from_third_on"),
        pytest.param(lambda ids, place, of_ids, of_place: (ids > 3) & (of_ids > 0), id="fourth"),
        pytest.param(lambda ids, place, of_ids, of_place: (place < 32) & (of_place < 32), id="first_tile"),
    ],
)
def test_leaks_that_the_first_packs_hide_are_found(files, leaks):
    first, (chosen, _, _) = read(eval_batches(files, SPEC, NUM_PACKS), files), choose(files)
    assert contamination.num_neighbours(first) == 6
    assert change_of_neighbours(first, leaks) == 0
    assert change_of_neighbours(chosen, leaks) > 0
    assert change_of_neighbours(chosen, lambda *_: False) == 0


def test_few_packs_show_all_that_the_files_have(files):
    """The reference is a plain union over all packs; few of many are chosen, and each by its number."""
    everything = read(eval_batches(files, SPEC, 100), files)
    all_shown = show_boundaries(everything["sequence_ids"], 4).any(axis=0)
    assert all_shown[:4].all() and all_shown[-5:].all()
    batch, numbers, missing = choose(files)
    np.testing.assert_array_equal(show_boundaries(batch["sequence_ids"], 4).any(axis=0), all_shown)
    assert not missing.any() and len(set(numbers)) == NUM_PACKS and (np.diff(numbers) > 0).all()
    for name, values in batch.items():
        np.testing.assert_array_equal(values, everything[name][numbers], err_msg=name)


def test_too_few_packs_are_the_best_and_say_so(files):
    batch, _, missing = choose(files, 1)
    assert batch["slot_weights"].sum() == 4 and missing[:4].tolist() == [True, True, True, False]
    line = describe_boundaries(batch["sequence_ids"], 4, missing)
    assert line.startswith("packs of 4 sequences, of at most 4; ")
    assert "; a larger num_packs would show packs of 1 to 3 sequences and tiles at " in line


def test_packs_that_show_nothing_new_are_spread(files):
    """Packs that show something are chosen, and others from all over the file; at most all that are."""
    alike = files[:1]
    assert choose(alike, 20)[1].tolist() == [*range(10)]
    _, numbers, missing = choose(alike, 5)
    assert not missing.any() and len(set(numbers)) == 5 and numbers[-1] > 6
    # Packs 3 and 7 hold one sequence: the second of them shows nothing
    assert len({3, 7} & {*choose(alike, 8)[1].tolist()}) == 1


IDS = np.repeat([[1, 2, 0], [1, 1, 1], [1, 2, 3]], [30, 20, 50], axis=1)


@pytest.mark.parametrize(
    ("rows", "missing", "line"),
    [
        ([0], [], "packs of 2 sequences, of at most 4; sequences begin behind others at 30 to 30, in 1 of 4"),
        (
            [0, 2],
            [],
            "packs of 2 to 3 sequences, of at most 4; sequences begin behind others at 30 to 50, in 2",
        ),
        ([0, 1], [3], "in 1 of 4 tiles of 32 tokens; a larger num_packs would show packs of 4 sequences"),
        ([0], [2, 3, -1], "would show packs of 3 to 4 sequences and tiles at 96"),
        ([0], [-3, -1], "a larger num_packs would show tiles at 32, 96"),
        ([1], [], "packs of 1 sequences, of at most 4; sequences begin behind others in 0 of 4 tiles of 32"),
    ],
)
def test_the_line_names_depths_places_and_tiles(rows, missing, line):
    missing_X = np.zeros(4 + 1 + 4, bool)
    missing_X[missing] = True
    assert line in describe_boundaries(IDS[rows], 4, missing_X)


def test_places_that_no_pack_covers_are_told():
    """Sequences begin behind others at 3, 5 and 9, so at 1 and 3 of 4; of those at 0 nothing is proven."""
    ids = [[1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 0, 0], [1] * 12]
    positions = [[0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 0, 0], [*range(12)]]
    batch = {"sequence_ids": ids, "position_ids": positions}
    line = "sequences begin at 2 of 4 places of the scan's chunks of 4 tokens; not covered: 0, 2"
    assert describe_places(batch, 4, "the scan's chunks") == line
    assert describe_places(batch, 8, "tiles").endswith("not covered: 0, 2, 4, 6 to 7")
    batch = {"sequence_ids": [[1, 2, 3]], "position_ids": [[0, 0, 0]]}
    assert describe_places(batch, 2, "x") == "sequences begin at 2 of 2 places of x of 2 tokens"
