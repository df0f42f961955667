"""The leaks of docs/guides/leaks.md: the audit of a tiny model of transformers fails, and passes beside it.

It alone catches an audit that no longer sees one of them, and a version of transformers that has mended one.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from reference import import_reference

torch, _ = import_reference()
from transformers_models import CLS, LENGTH, PAD, SEP, VOCAB, WINDOW, build  # noqa: E402

import bert_packed  # noqa: E402
from bert_packed.torch.model_inputs import ModelInputs  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/leaks.md"
NEIGHBOURS, ALONE = "neighbors: change of outputs", "unpacked: outputs"
MASK, CAUSAL_MASK = ModelInputs(), ModelInputs(is_causal=True)
POSITIONS, VARLEN = ModelInputs("positions", is_causal=True), ModelInputs("varlen")


def mask_of_ones(packs):
    return POSITIONS(packs) | {"attention_mask": torch.ones(packs["input_ids"].shape, dtype=torch.long)}


def with_cache(packs):
    return {name: values for name, values in POSITIONS(packs).items() if name != "use_cache"}


def sequence_numbers(packs):
    numbers = torch.as_tensor(packs["sequence_ids"], dtype=torch.int32)
    return {"input_ids": torch.as_tensor(packs["input_ids"]), "seq_idx": numbers, "use_cache": False}


# Model, attention, what is given it, the check that fails, and what passes; None where nothing does
LEAKS = {
    "a 2D mask": ("llama", "sdpa", mask_of_ones, NEIGHBOURS, POSITIONS),
    "a cache": ("llama", "sdpa", with_cache, NEIGHBOURS, POSITIONS),
    "offsets under eager": ("llama", "eager", VARLEN, NEIGHBOURS, POSITIONS),
    "offsets under sdpa": ("bert", "sdpa", VARLEN, NEIGHBOURS, MASK),
    "positions of an encoder": ("bert", "sdpa", ModelInputs("positions"), NEIGHBOURS, MASK),
    "positions that are not read": ("opt", "sdpa", POSITIONS, NEIGHBOURS, CAUSAL_MASK),
    "positions from 0": ("roberta", "sdpa", MASK, ALONE, ModelInputs(first_position=PAD + 1)),
    "positions from 1": ("bert", "sdpa", ModelInputs(first_position=1), ALONE, MASK),
    "no window": ("modernbert", "sdpa", MASK, ALONE, ModelInputs(sliding_window=WINDOW)),
    "a Mamba": ("mamba", "eager", sequence_numbers, NEIGHBOURS, None),
    "a Mamba-2": ("mamba2", "eager", sequence_numbers, NEIGHBOURS, None),
    "a gated delta net": ("qwen3_next", "sdpa", POSITIONS, NEIGHBOURS, None),
}


@pytest.fixture(scope="module")
def packs():
    rng = np.random.default_rng(0)
    rows = [[CLS, *rng.integers(5, VOCAB, length), SEP] for length in rng.integers(3, 12, 8)]
    return bert_packed.pack(rows, LENGTH)


def failed(model, packs, inputs):
    return {check.name for check in bert_packed.audit_model(model, packs, inputs).checks if not check.passed}


@pytest.mark.parametrize("name", LEAKS)
def test_a_known_leak_fails_and_the_right_inputs_pass(name, packs):
    kind, attention, wrong, expected, right = LEAKS[name]
    model = build(kind, attention).eval()
    found = failed(model, packs, wrong)
    # Whoever sees neighbors differs from a sequence alone; wrong positions show in that alone
    assert ALONE in found and (NEIGHBOURS in found) == (expected == NEIGHBOURS)
    assert right is None or not failed(model, packs, right)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_what_is_not_finite_passes_through_a_right_mask(packs, attention, value):
    """0 times NaN is NaN: attention weighs a masked value by 0, and adds it."""
    # Not its head, whose weights are those of the tokens
    model, token = build("bert", attention).eval().bert, int(packs["input_ids"][0, 1])
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[token] = value
        # A sequence without the token has them in the pack, and has not alone
        ids, tokens = packs["sequence_ids"][0], packs["input_ids"][0]
        number = next(one for one in range(1, ids.max() + 1) if token not in tokens[ids == one])
        together = model(**MASK({name: values[:1] for name, values in packs.items()}))[0][0, ids == number]
        alone = model(input_ids=torch.as_tensor(tokens[ids == number])[None])[0]
    assert alone.isfinite().all() and not together.isfinite().any()
    assert {NEIGHBOURS, ALONE} <= failed(model, packs, MASK)


def test_the_page_has_every_leak():
    """Each row of its table of leaks names a test of this file."""
    named = re.findall(r"^\| .* \| `([^`|]+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(named) == sorted([*LEAKS, "what is not finite"])
