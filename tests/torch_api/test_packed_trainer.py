"""`PackingTrainer` evaluates and counts as a plain loop over single sequences does.

This file alone catches a loss of an evaluation that weighs batches, and figures of other batches in a log.
"""

import numpy as np
import pytest
from reference import import_trainer
from transformers_models import LENGTH, build, make_tokenizer, make_trainer, random_rows

torch, transformers, datasets = import_trainer()

from bert_packed.torch import (  # noqa: E402
    PackingCollator,
    PackingTrainer,
    enable_packing,
    pack_dataset,
    per_sequence_loss,
)

KINDS = {  # model, options of the collator, loss
    "of predictions": ("bert", {"seed": 1}, None),
    "of sequences": ("bert", {"seed": 1, "per_sequence": True}, per_sequence_loss),
    "of tokens": ("llama", {"mlm_probability": None}, None),
}


@pytest.fixture(scope="module")
def rows():
    """Short sequences first, so that the batches have unequal numbers of sequences and predictions."""
    return sorted(random_rows(23, 1, 20), key=lambda row: len(row["input_ids"]))


def loss_alone(model, rows, options, loss):
    """By a loop over single sequences, each masked alone and without padding."""
    collator = PackingCollator(make_tokenizer(), LENGTH, **options | {"per_sequence": False})
    sums, counts = [], []
    for row in rows:
        batch, length = collator([row]), len(row["input_ids"])
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"][:, :length]).logits[0]
        labels = batch["labels"][0, :length]
        if collator.is_causal:
            logits, labels = logits[:-1], labels[1:]
        sums.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item())
        counts.append((labels != -100).sum().item())
    if loss is per_sequence_loss:
        return np.mean([total / max(1, count) for total, count in zip(sums, counts, strict=True)])
    return sum(sums) / sum(counts)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_losses_are_those_of_sequences(rows, tmp_path, kind, is_packed):
    """Whatever the batches hold. Trainer is right where a row is a sequence and each weighs alike."""
    name, options, loss = KINDS[kind]
    model, size = build(name).eval(), 2 if is_packed else 5
    want, found = loss_alone(model, rows, options, loss), {}
    dataset = datasets.Dataset.from_list(rows)
    given = pack_dataset(dataset, LENGTH) if is_packed else dataset
    collator = PackingCollator(make_tokenizer(), LENGTH, **options)
    for make in (PackingTrainer, transformers.Trainer):
        trainer = make_trainer(model, given, collator, tmp_path, size, compute_loss_func=loss, make=make)
        found[make] = trainer.evaluate()["eval_loss"]
        assert trainer.predict(given).metrics["test_loss"] == found[make]
    assert found[PackingTrainer] == pytest.approx(want, rel=1e-6)
    is_right = abs(found[transformers.Trainer] - want) < 2e-4 * want
    assert is_right == (kind == "of sequences" and not is_packed)


def test_a_batch_without_predictions_counts_nothing(rows, tmp_path):
    """The loss of a model is NaN there."""
    labels = [[-100] * len(row["input_ids"]) for row in rows[:5]]
    labels += [[-100, *row["input_ids"][1:]] for row in rows[5:]]
    given = [{**row, "labels": own} for row, own in zip(rows, labels, strict=True)]
    collator, model = PackingCollator(make_tokenizer(), LENGTH, mlm_probability=None), build("llama")
    trainer = make_trainer(model, given, collator, tmp_path, 5, make=PackingTrainer)
    want = loss_alone(model.eval(), rows[5:], {"mlm_probability": None}, None)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("kind", ["packed before", "packed by batch", "classifier"])
def test_logs_have_the_figures_of_packing(rows, tmp_path, kind):
    """Of the steps since the log before, without the evaluations between them."""
    tokenizer, model, given, labels = make_tokenizer(), build("bert"), rows, None
    if kind == "packed before":
        given = pack_dataset(datasets.Dataset.from_list(rows), LENGTH)
    if kind == "classifier":
        given, labels = [{**row, "labels": number % 2} for number, row in enumerate(rows)], "sequence"
        model = enable_packing(transformers.BertForSequenceClassification(model.config))
    collator = PackingCollator(tokenizer, LENGTH, labels=labels)
    settings = {"train_sampling_strategy": "sequential", "eval_strategy": "steps"}
    options = {"make": PackingTrainer, "settings": settings, "eval_dataset": list(given)[:3]}
    trainer = make_trainer(model, given, collator, tmp_path, 3, 2, **options)
    trainer.train()
    assert not collator.keeps_sequence_ids
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    for first, log in zip((0, 6), logs, strict=True):
        micro_batches = [list(given)[start : start + 3] for start in (first, first + 3)]
        if kind == "packed before":
            num_sequences = sum(max(row["sequence_ids"]) for part in micro_batches for row in part)
            num_tokens = sum(one > 0 for part in micro_batches for row in part for one in row["sequence_ids"])
        else:
            num_sequences = sum(map(len, micro_batches))
            num_tokens = sum(len(row["input_ids"]) for part in micro_batches for row in part)
        packs = [batch.get("pack_index", batch["input_ids"]) for batch in map(collator, micro_batches)]
        assert log["packing_factor"] == num_sequences / sum(map(len, packs)) > 1
        assert log["packing_efficiency"] == num_tokens / sum(one.numel() for one in packs)
    assert logs[0]["packing_factor"] != logs[1]["packing_factor"]


def test_another_collator_is_refused(rows, tmp_path):
    padding = transformers.DataCollatorWithPadding(make_tokenizer())
    with pytest.raises(ValueError, match=r"`data_collator` must be a PackingCollator\. Received: Data"):
        make_trainer(build("bert"), rows, padding, tmp_path, 2, make=PackingTrainer)
