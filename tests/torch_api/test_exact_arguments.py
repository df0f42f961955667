"""Arguments that a collator finds for its model: the exact ones of each kind, or a line that names them.

This file alone catches a model that is given wrong arguments although the collator knows it.
"""

import logging
import pickle
from types import SimpleNamespace

import pytest
from reference import import_reference
from transformers_models import LENGTH, PAD, WINDOW, build, make_tokenizer

torch, transformers = import_reference()

from bert_packed.torch import PackingCollator  # noqa: E402
from bert_packed.torch.exact_arguments import find_arguments  # noqa: E402

HALF = " in half precision"  # which hid wrong arguments
MASKED, CAUSAL = {}, {"mlm_probability": None}
MASK, POSITIONS = "attention='mask', first_position=0", "attention='positions', first_position=0"
NOTHING = "`model` must compute each sequence of a pack as alone, under arguments of `PackingCollator`."


class Scan(torch.nn.Module):
    """Sums of the tokens before, which only `seq_idx` begins with each sequence."""

    config = SimpleNamespace(pad_token_id=PAD)
    dtype = torch.float32

    def __init__(self, needs_kernel=False):
        super().__init__()
        self.embedding, self.needs_kernel = torch.nn.Embedding(60, 8), needs_kernel

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, seq_idx=None, **others):
        if seq_idx is not None and self.needs_kernel:
            raise ValueError("can't keep packed sequences apart without `mamba_ssm`")
        if self.training:
            torch.rand(())  # as layer drop does
        seq_idx = torch.zeros_like(input_ids) if seq_idx is None else seq_idx
        is_before = (seq_idx[:, :, None] == seq_idx[:, None]).tril()
        return (is_before.float() @ self.embedding(input_ids),)


def make(kind, attention="eager"):
    scans = {"scan": Scan, "scan_without_kernel": lambda: Scan(needs_kernel=True)}
    if kind in scans:
        return scans[kind]()
    name = kind.removesuffix(HALF)
    return build(name, attention) if name == kind else build(name, attention).bfloat16()


def collate(model, **options):
    return PackingCollator(make_tokenizer(), LENGTH, model=model, **options)


@pytest.mark.parametrize(
    "kind, attention, options, found",
    [
        ("bert", "sdpa", MASKED, MASK),
        ("bert", "plain_varlen", MASKED, "attention='varlen', first_position=0"),
        ("roberta", "sdpa", MASKED, f"attention='mask', first_position={PAD + 1}"),
        (f"roberta{HALF}", "sdpa", MASKED, f"attention='mask', first_position={PAD + 1}"),
        ("modernbert", "sdpa", MASKED, f"{MASK}, sliding_window={WINDOW}"),
        ("llama", "sdpa", CAUSAL, POSITIONS),
        ("llama", "sdpa", CAUSAL | {"attention": "mask"}, MASK),
        ("gpt_neox", "sdpa", CAUSAL, POSITIONS),
        ("qwen2", "sdpa", CAUSAL, POSITIONS),
        ("mistral", "eager", CAUSAL, POSITIONS),
        ("opt", "eager", CAUSAL, MASK),
        ("gpt_oss", "eager", CAUSAL, f"{MASK}, sliding_window=3"),
        ("scan", None, CAUSAL, f"{POSITIONS}, return_seq_idx=True"),
    ],
)
def test_arguments_of_a_model(caplog, kind, attention, options, found):
    model = make(kind, attention).train()
    model.get_input_embeddings().eval()  # as a part that is frozen
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    with caplog.at_level(logging.INFO, logger="bert_packed"):
        collator = collate(model, **options)
    assert caplog.messages == [f"{type(model).__name__} is exact on packs with {found}"]
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(value.grad is None and value.requires_grad for value in model.parameters())
    assert len(pickle.dumps(collator.model_inputs)) < 1000
    assert not any(isinstance(value, torch.nn.Module) for value in vars(collator).values())


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (
            "bert",
            {"first_position": 1},
            f"have mlm_probability=a rate, {MASK} for BertForMaskedLM. Received: f",
        ),
        (
            "roberta",
            {"first_position": 0},
            f"attention='mask', first_position={PAD + 1} for RobertaForMaskedLM",
        ),
        ("bert", {"attention": "varlen"}, f"{MASK} for BertForMaskedLM. Received: attention='varlen'."),
        (
            "bert",
            CAUSAL,
            f"have mlm_probability=a rate, {MASK} for BertForMaskedLM. Received: mlm_probability=N",
        ),
        (f"bert{HALF}", {"dtype": torch.float32}, "`dtype` must be that of the model, torch.bfloat16."),
        (
            "llama",
            MASKED,
            f"have mlm_probability=None, {POSITIONS} for LlamaForCausalLM. Received: mlm_probab",
        ),
        ("gpt_oss", CAUSAL | {"attention": "positions"}, f"{MASK}, sliding_window=3 for GptOssForCausalLM."),
        ("wide_mistral", CAUSAL | {"attention": "mask"}, f"{POSITIONS} for MistralForCausalLM. Received: at"),
        (
            "convbert",
            MASKED,
            f"{NOTHING} Received: ConvBertForMaskedLM; with {MASK}: neighbors: change of out",
        ),
        ("scan_without_kernel", CAUSAL, "ValueError: can't keep packed sequences apart without `mamba_ssm`"),
    ],
)
def test_a_model_that_would_train_wrongly_is_refused(kind, options, message):
    with pytest.raises(ValueError) as error:
        collate(make(kind), **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_half_precision_is_audited_in_float32():
    """Differences of wrong arguments may be as small as its rounding, which the audit tolerates."""
    (first, *_) = find_arguments(make(f"roberta{HALF}"))
    assert not first.is_exact and {check.tolerance for check in first.result.checks} == {0, 1e-5}


def test_no_position_beyond_the_table_is_tried():
    """It would be an error that a GPU does not recover from."""
    model = build("bert")
    model.config.pad_token_id = LENGTH - 5
    assert {one.inputs.first_position for one in find_arguments(model)} == {0}


def test_a_window_that_no_sequence_here_shows_is_not_left_out():
    model = build("mistral")
    model.config.sliding_window = 4096
    assert {str(one) for one in find_arguments(model, attention="mask")} == {
        f"attention='mask', first_position={first}, sliding_window=4096" for first in (0, PAD + 1)
    }


def test_attention_in_blocks_is_refused():
    """BigBird leaves it for inputs as short as those that a model is tried on."""
    model = build("bert")
    model.config.attention_type = "block_sparse"
    with pytest.raises(ValueError, match='`model` must have attention_type="original_full"'):
        collate(model)


def test_numbers_of_sequences_for_scans():
    collator = PackingCollator(make_tokenizer(), 8, None, return_seq_idx=True)
    batch = collator([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 5]}, {"input_ids": [5] * 7}])
    assert sorted(batch["seq_idx"].tolist()) == [[0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1, 2, 2]]
    assert batch["seq_idx"].dtype == torch.int32
