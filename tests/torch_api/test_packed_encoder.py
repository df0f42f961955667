"""Classifiers, regressions and taggers of transformers on packs equal the same models on single sequences.

This file alone catches a head that sees another sequence, or a loss that weighs packs.
"""

import numpy as np
import pytest
from reference import import_reference
from transformers_models import IDS, LENGTH, PAD, VOCAB

torch, transformers = import_reference()
pytest.importorskip("accelerate", reason="pip install -e '.[torch]'")
datasets = pytest.importorskip("datasets", reason="pip install -e '.[torch]'")

from bert_packed.torch import PackingCollator, enable_packing, pack_dataset  # noqa: E402

NUM, NUM_LABELS = 9, 3
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
CONFIGS = {  # class, attention, options; positions suffice for single sequences, not for whole packs
    "bert": ("Bert", "sdpa", {}),
    "distilbert": ("DistilBert", "eager", {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}),
    "electra": ("Electra", "sdpa", {"embedding_size": 8}),
    "roberta": ("Roberta", "eager", IDS | {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", "sdpa", IDS | {"pad_token_id": 1}),
    "deberta": ("Deberta", "eager", RELATIVE),
    "deberta-v2": ("DebertaV2", "eager", RELATIVE | {"position_buckets": 4, "share_att_key": True}),
    "modernbert": ("ModernBert", "sdpa", {"classifier_pooling": "cls"}),
    "modernbert, mean": ("ModernBert", "eager", {"classifier_pooling": "mean"}),
}
HEADS = {
    "one": ("SequenceClassification", NUM_LABELS),
    "several": ("SequenceClassification", NUM_LABELS),
    "number": ("SequenceClassification", 1),
    "tagger": ("TokenClassification", NUM_LABELS),
}


class Tokenizer:
    pad_token_id = PAD


def build(kind, head="one"):
    name, attention, options = CONFIGS[kind]
    task, num_labels = HEADS[head]
    if name == "ModernBert":
        options = options | IDS | {"local_attention": 4, "global_attn_every_n_layers": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB, max_position_embeddings=14, num_labels=num_labels, **{**SIZES, **options}
    )
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    if head == "several":
        config.problem_type = "multi_label_classification"
    model = getattr(transformers, f"AutoModelFor{task}").from_config(config, attn_implementation=attention)
    with torch.no_grad():  # initial weights are so small that attention would hardly count
        for value in model.parameters():
            value += 0.2 * torch.randn_like(value)
    return model


def random_rows(head):
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(5, VOCAB, length).tolist()} for length in rng.integers(2, 13, NUM)]
    for number, row in enumerate(rows):
        row["labels"] = {
            "one": number % NUM_LABELS,
            "several": rng.integers(0, 2, NUM_LABELS).tolist(),
            "number": number if number % 2 else number - 0.5,
            "tagger": rng.integers(0, NUM_LABELS, len(row["input_ids"])).tolist(),
        }[head]
        if head == "tagger":
            row["labels"][0] = -100
    return rows


def make_collator(head):
    return PackingCollator(Tokenizer(), LENGTH, labels="token" if head == "tagger" else "sequence")


def alone(model, rows, head):
    """Mean loss, and logits, of one sequence at a time; of all labelled tokens for taggers."""
    losses, counts, logits = [], [], []
    for row in rows:
        labels = torch.tensor([row["labels"]], dtype=torch.float if head in ("several", "number") else None)
        outputs = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels)
        counts.append((labels != -100).sum() if head == "tagger" else 1)
        losses.append(outputs.loss * counts[-1])
        logits.append(outputs.logits[0].detach())
    return sum(losses) / sum(counts), logits


def gradients_of(model):
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("is_dataset", [False, True])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_heads_on_packs_equal_those_on_single_sequences(kind, head, is_dataset):
    rows = random_rows(head)
    collator = make_collator(head)
    model, plain = enable_packing(build(kind, head)), build(kind, head)
    given = (
        pack_dataset(datasets.Dataset.from_list(rows), LENGTH, labels=collator.labels) if is_dataset else rows
    )
    batch = collator(list(given))
    assert len(batch["pack_index"]) < NUM == len(batch["input_ids"])  # packs that hold several sequences
    outputs = model(**batch)
    want, logits = alone(plain, rows, head)
    assert outputs.loss.item() == pytest.approx(want.item(), rel=1e-6)
    if not is_dataset:
        for row, one in zip(outputs.logits, logits, strict=True):
            torch.testing.assert_close(row[: len(one)] if head == "tagger" else row, one)
    outputs.loss.backward()
    want.backward()
    found, gradients = gradients_of(model), gradients_of(plain)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # Key biases have a gradient of truly 0
        tolerance = max(1e-6, 1e-5 * gradient.abs().max().item())
        assert (found[name] - gradient).abs().max().item() <= tolerance, name
