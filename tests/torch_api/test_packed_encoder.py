"""Classifiers, regressions and taggers of transformers on packs equal the same models on single sequences.

This file alone catches a head that sees another sequence, or a loss that weighs packs.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from reference import import_trainer
from transformers_models import (
    IDS,
    LEARNING_RATE,
    LENGTH,
    SIZES,
    VOCAB,
    differing,
    gradients_of,
    make_tokenizer,
    make_trainer,
    run_example,
)
from transformers_models import build as build_masked

torch, transformers, datasets = import_trainer()

from bert_packed.torch import PackingCollator, enable_packing, pack_dataset  # noqa: E402
from bert_packed.torch.packed_encoder import HEADS as HEAD_CLASSES  # noqa: E402

NUM, NUM_LABELS = 9, 3
LEAST = 1e-6  # difference that counts: some biases have a gradient of truly 0
RELATIVE = {"type_vocab_size": 2, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
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
        row["token_type_ids"] = [place % 2 for place in range(len(row["input_ids"]))]
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
    return PackingCollator(make_tokenizer(), LENGTH, labels="token" if head == "tagger" else "sequence")


def alone(model, rows, head):
    """Mean loss, and logits, of one sequence at a time; of all labelled tokens for taggers."""
    losses, counts, logits = [], [], []
    for row in rows:
        labels = torch.tensor([row["labels"]], dtype=torch.float if head in ("several", "number") else None)
        tokens = {name: torch.tensor([row[name]]) for name in ("input_ids", "token_type_ids")}
        outputs = model(**tokens, labels=labels)
        counts.append((labels != -100).sum() if head == "tagger" else 1)
        losses.append(outputs.loss * counts[-1])
        logits.append(outputs.logits[0].detach())
    return sum(losses) / sum(counts), logits


def pack(rows, head):
    packed = pack_dataset(datasets.Dataset.from_list(rows), LENGTH, labels=make_collator(head).labels)
    assert 1 < len(packed) < NUM
    return packed


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_heads_on_packs_equal_those_on_single_sequences(kind, head):
    rows, model, plain = random_rows(head), enable_packing(build(kind, head)), build(kind, head)
    batch = make_collator(head)(rows)
    assert len(batch["pack_index"]) < NUM == len(batch["input_ids"])  # packs that hold several sequences
    outputs = model(**batch)
    want, logits = alone(plain, rows, head)
    assert outputs.loss.item() == pytest.approx(want.item(), rel=1e-6)
    for row, one in zip(outputs.logits, logits, strict=True):
        torch.testing.assert_close(row[: len(one)] if head == "tagger" else row, one)
    outputs.loss.backward()
    want.backward()
    assert not differing(gradients_of(model), gradients_of(plain), LEAST)


@pytest.mark.parametrize(
    "head, is_packed", [("one", False), ("several", True), ("number", True), ("tagger", False)]
)
def test_trainer_on_packs_equals_a_loop_over_sequences(tmp_path, head, is_packed):
    """With micro-batches of unequal sequences and labels; each step is an epoch."""
    rows, model, plain = random_rows(head), enable_packing(build("bert", head)), build("bert", head)
    given, seen = pack(rows, head) if is_packed else rows, []
    size = -(-len(given) // 2)
    trainer = make_trainer(
        model,
        given,
        make_collator(head),
        tmp_path,
        size,
        accumulation=2,
        eval_dataset=rows,
        compute_metrics=lambda evaluated: seen.append(evaluated) or {},
    )
    trainer.train()
    optimizer = torch.optim.SGD(plain.parameters(), LEARNING_RATE)
    for _ in range(2):
        optimizer.zero_grad()
        alone(plain, rows, head)[0].backward()
        optimizer.step()
    assert not differing(model.state_dict(), plain.state_dict(), LEAST)

    parts = [rows[start : start + size] for start in range(0, NUM, size)]  # their mean for taggers, as padded
    want = sum(len(part) * alone(plain, part, head)[0].item() for part in parts) / NUM
    assert trainer.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-6)
    trainer.save_model()
    saved = type(plain).from_pretrained(tmp_path).eval()
    singles, saved_singles = alone(plain, rows, head)[1], alone(saved, rows, head)[1]
    assert len(seen[0].predictions) == len(seen[0].label_ids) == NUM
    for number, (row, one, again) in enumerate(zip(rows, singles, saved_singles, strict=True)):
        got = seen[0].predictions[number][: len(one)]  # of a tagger without padding
        np.testing.assert_allclose(got, one, atol=1e-5)
        np.testing.assert_allclose(got, again, atol=1e-5)
        labels = np.ravel(seen[0].label_ids[number])
        np.testing.assert_array_equal(labels[: np.size(row["labels"])], np.ravel(row["labels"]))
        assert set(labels[np.size(row["labels"]) :]) <= {-100}


def fake(**config):
    return SimpleNamespace(config=SimpleNamespace(**config))


def change(kind, **options):
    model = build(kind)
    for name, value in options.items():
        setattr(model.config, name, value)
    return model


TYPES = (
    "`model` must be one of bert, distilbert, electra, roberta, xlm-roberta, deberta, deberta-v2, modernbert."
)
MIXING = "`model` must be an encoder without convolution, which would mix sequences. Received: "
REFUSED = [
    (lambda: None, f"{TYPES} Received: None."),
    *((lambda kind=kind: fake(model_type=kind), f"{TYPES} Received: {kind}.") for kind in ("fnet", "gpt2")),
    (
        lambda: build_masked("bert"),
        f"`model` must be one {' or '.join(HEAD_CLASSES)}. Received: BertForMaskedLM.",
    ),
    (lambda: change("bert", is_decoder=True), f"{MIXING}BertForSequenceClassification."),
    (lambda: change("deberta-v2", conv_kernel_size=3), f"{MIXING}DebertaV2ForSequenceClassification."),
]


@pytest.mark.parametrize("make, message", REFUSED)
def test_models_that_cannot_be_packed_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        enable_packing(make())


def test_calls_that_would_be_wrong_are_refused():
    """Of an attention that ignores masks, and of an evaluation that Trainer would cut short."""
    rows, collator, model = random_rows("one"), make_collator("one"), enable_packing(build("bert"))
    batch = collator(list(pack(rows, "one")))
    model.eval()(**collator(rows))
    with pytest.raises(ValueError, match="rows of evaluation must be sequences"):
        model(**batch)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"`attn_implementation` must be one of sdpa, eager\. Received"):
        model.train()(**batch)


def test_only_packs_and_enabled_models_are_packed():
    """Each equals the plain model: without packs, and a model that does not know them."""
    rows, model, plain = random_rows("one"), enable_packing(build("bert")), build("bert")
    batch = {"input_ids": torch.tensor([[5, 6, 7]])}
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)
    singles = torch.stack(alone(plain, rows, "one")[1])
    torch.testing.assert_close(plain(**make_collator("one")(rows)).logits, singles)


@pytest.mark.parametrize("is_packed", [False, True])
def test_further_columns_stay_with_their_sequences(is_packed):
    rows = [{**row, "number": 10 + number} for number, row in enumerate(random_rows("one"))]
    # An unused slot of a pack may have a label
    packed = [{**row, "labels": [*row["labels"], 7]} for row in pack(rows, "one")]
    batch = make_collator("one")(packed if is_packed else rows)
    wanted = {tuple(row["input_ids"]): (row["number"], row["labels"]) for row in rows}
    names = ("input_ids", "attention_mask", "number", "labels")
    for tokens, mask, *found in zip(*(batch[name] for name in names), strict=True):
        assert wanted.pop(tuple(tokens[mask == 1].tolist())) == tuple(map(int, found))
    assert not wanted


def test_a_micro_batch_without_a_label_adds_nothing():
    """Where a mean over its labels would be NaN."""
    model, batch = enable_packing(build("bert", "tagger")), make_collator("tagger")(random_rows("tagger"))
    batch["labels"].fill_(-100)
    loss = model(**batch, num_items_in_batch=torch.tensor(5)).loss
    loss.backward()
    assert loss == 0 and all((gradient == 0).all() for gradient in gradients_of(model).values())


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")  # by Trainer's default
def test_the_classifier_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_example(1)
    assert names["trainer"].state.log_history[-1]["eval_accuracy"] == 1
    saved = transformers.AutoModelForSequenceClassification.from_pretrained("runs/classifier")
    assert saved.config.id2label == {0: "number", 1: "person", 2: "place"}
    batch = next(iter(names["trainer"].get_train_dataloader()))
    assert 2 * len(batch["pack_index"]) < len(batch["labels"]) == 16
