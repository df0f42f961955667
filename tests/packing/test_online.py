"""Online packing loses nothing, keeps its age limit, and goes on exactly where it stopped."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_packed.packing.baselines import shuffled_lengths
from bert_packed.packing.histogram import load_known_histogram
from bert_packed.packing.online import POLICIES, OnlinePacker


def packs_of(ready):
    numbers, sizes = ready
    assert len(numbers) == sizes.sum()
    return [part.tolist() for part in np.split(numbers, np.cumsum(sizes)[:-1])] if len(sizes) else []


@pytest.mark.parametrize("policy", POLICIES)
@given(
    lengths=st.lists(st.integers(1, 16), max_size=120),
    depth=st.one_of(st.integers(1, 5), st.just("max")),
    buffer_size=st.integers(1, 20),
    share=st.sampled_from([0.1, 0.5, 1.0]),
    step=st.integers(1, 50),
)
@settings(max_examples=60, deadline=None)
def test_each_sequence_leaves_once_and_in_time(policy, lengths, depth, buffer_size, share, step):
    limits = {"buffer_size": buffer_size, "max_age": 2 * buffer_size}
    packer, again = (OnlinePacker(16, depth, **limits, policy=policy, leaving_share=share) for _ in range(2))
    packs = []
    for arrived, length in enumerate(lengths):
        for pack in packs_of(packer.add([length])):
            assert arrived - min(pack) <= 2 * buffer_size
            packs.append(pack)
        assert len(packer.state()["lengths"]) < buffer_size
        assert all(arrived - number <= 2 * buffer_size for number in packer.state()["numbers"])
    packs += packs_of(packer.flush())
    assert sorted(number for pack in packs for number in pack) == list(range(len(lengths)))
    limit = 16 if depth == "max" else depth
    assert all(sum(lengths[number] for number in pack) <= 16 and len(pack) <= limit for pack in packs)

    in_steps = []  # and in another process after each
    for at in range(0, len(lengths), step):
        in_steps += packs_of(again.add(lengths[at : at + step]))
        again = OnlinePacker.from_state(json.loads(json.dumps(again.state())))
    assert in_steps + packs_of(again.flush()) == packs


@pytest.mark.parametrize(
    ("lengths", "settings", "expected"),
    [
        # the 1 fits beside the 6 and beside the 4 and 3: the policy chooses
        ([6, 4, 3, 1], {"leaving_share": 1.0, "policy": "best_fit"}, [[0], [1, 2, 3]]),
        ([6, 4, 3, 1], {"leaving_share": 1.0, "policy": "first_fit"}, [[0, 3], [1, 2]]),
        # depth 3 has packs of three, where LPFHP makes one pack more
        ([4, 4, 3, 2, 2, 1], {"leaving_share": 1.0, "max_sequences_per_pack": 3}, [[0, 3, 4], [1, 2, 5]]),
        # only the share leaves, and of equal packs no more
        ([4, 4, 4, 4], {"leaving_share": 0.75}, [[0, 1], [2, 3]]),
        ([4, 4, 4, 4], {"leaving_share": 0.5}, [[0, 1]]),
        # all are too old, those of a pack that has left already among them
        ([5, 3, 5, 2], {"leaving_share": 0.25, "max_age": 4}, [[0, 1], [2, 3]]),
        ([4, 4, 4, 4, 4, 4], {"leaving_share": 0.1, "max_age": 6}, [[0, 1], [2, 3], [4, 5]]),
        # the first is, and takes its company along; one of the full packs leaves, the other waits
        ([5, 2, 8, 8], {"leaving_share": 0.25, "max_age": 7}, [[0, 1], [2]]),
        ([2, 5, 8, 8, 7], {"leaving_share": 0.2, "max_age": 9}, [[0, 1], [2]]),
    ],
)
def test_packs_that_leave_the_buffer_by_hand(lengths, settings, expected):
    settings = {"max_sequences_per_pack": "max", "buffer_size": len(lengths)} | settings
    assert packs_of(OnlinePacker(8, **settings).add(lengths)) == expected


def test_a_state_has_every_setting():
    settings = {"max_seq_length": 20, "max_sequences_per_pack": "max", "buffer_size": 4}
    default = OnlinePacker(20, "max", buffer_size=4).state()["settings"]
    assert default == {**settings, "max_age": 40, "policy": "best_fit", "leaving_share": 0.75}
    changed = {**settings, "max_age": 9, "policy": "first_fit", "leaving_share": 0.5}
    packer = OnlinePacker(**changed)
    assert OnlinePacker.from_state(packer.state()).state()["settings"] == changed


def test_wikipedia_stream_is_packed_to_the_efficiency_asked():
    lengths = shuffled_lengths(load_known_histogram("wikipedia_512", 512) // 100, seed=0)
    packer = OnlinePacker(512, "max", buffer_size=10_000)
    num_packs = len(packer.add(lengths)[1]) + len(packer.flush()[1])
    assert lengths.sum() / (512 * num_packs) >= 0.995
