"""Packs for transformers: a run of `Trainer` on packs equals a plain loop over sequences without padding."""

import itertools

import numpy as np
import pytest
from reference import import_trainer
from transformers_models import (
    CLS,
    LEARNING_RATE,
    LENGTH,
    MASK,
    PAD,
    SEP,
    VOCAB,
    WINDOW,
    build,
    differing,
    gradients_of,
    make_tokenizer,
    make_trainer,
    random_rows,
    run_example,
)

torch, transformers, datasets = import_trainer()

import bert_packed  # noqa: E402
from bert_packed.torch import PackingCollator, pack_dataset, per_sequence_loss  # noqa: E402

NUM = 12
CAUSAL = ("llama", "mistral", "gpt_oss")
OPTIONS = {"roberta": {"first_position": PAD + 1}} | {kind: {"mlm_probability": None} for kind in CAUSAL}
ONE_CPU = "ignore:This DataLoader will create 2 worker processes"  # on a machine with one
WINDOWED = {"sliding_window": WINDOW}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def rows():
    return random_rows(NUM, 3, 13)


class Gradients(transformers.TrainerCallback):
    """Keeps the gradients of each step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **more):
        self.steps.append(gradients_of(model))


def train(*arguments, **options):
    """Losses and gradients of the steps."""
    trainer, gradients = make_trainer(*arguments, **options), Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], gradients.steps


def sequences_of(batch):
    """Tokens and labels of each sequence of a batch, cut out by a plain loop."""
    found = []
    for tokens, labels, positions in zip(
        *(batch[name].tolist() for name in ("input_ids", "labels", "position_ids")), strict=True
    ):
        num_tokens = max(place for place, token in enumerate(tokens, 1) if token != PAD)
        assert set(labels[num_tokens:]) <= {-100}
        for token, label, position in zip(tokens[:num_tokens], labels, positions, strict=False):
            if position == min(positions):
                found.append(([], []))
            found[-1][0].append(token)
            found[-1][1].append(label)
    return found


def train_alone(model, sequences, is_causal=False, per_sequence=False):
    """The same steps by a plain loop over single sequences without padding."""
    optimizer = torch.optim.SGD(model.train().parameters(), LEARNING_RATE)
    losses, steps = [], []
    for _ in range(2):
        nll, counts = [], []
        for tokens, labels in sequences:
            logits = model(input_ids=torch.tensor([tokens])).logits[0]
            labels = torch.tensor(tokens if is_causal else labels)
            if is_causal:
                logits, labels = logits[:-1], labels[1:]
            nll.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            counts.append(int((labels != -100).sum()))
        if per_sequence:
            loss = sum(one / max(1, count) for one, count in zip(nll, counts, strict=True)) / len(nll)
        else:
            loss = sum(nll) / sum(counts)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        steps.append(gradients_of(model))
        optimizer.step()
    return losses, steps


def differences(run, other):
    """Names of what differs between two runs."""
    losses, steps = run
    wanted_losses, wanted_steps = other
    assert len(losses) == len(steps) == 2 and losses[0] != losses[1]
    found = [] if losses == pytest.approx(wanted_losses, rel=1e-5) else ["loss"]
    return found + [name for pair in zip(steps, wanted_steps, strict=True) for name in differing(*pair)]


def run_both(kind, attention, collator, rows, folder, change=lambda batch: batch, accumulation=1):
    """Runs on packs, each batch changed, and on their sequences alone."""
    batch = collator(rows)
    sequences = sequences_of(batch)
    assert len(batch["input_ids"]) < NUM == len(sequences)  # packs that hold several sequences
    model, size = build(kind, attention), NUM // accumulation
    packed = train(model, rows, lambda rows: change(collator(rows)), folder, size, accumulation)
    return packed, train_alone(build(kind, "eager"), sequences, is_causal=kind in CAUSAL)


POSITIONS, VARLEN, FOUND = {"attention": "positions"}, {"attention": "varlen"}, {"model": True}


@pytest.mark.parametrize(
    "kind, attention, options, accumulation",
    [
        ("bert", "eager", {}, 1),
        ("bert", "sdpa", {}, 1),
        ("bert", "plain_varlen", VARLEN, 1),
        ("roberta", "sdpa", {}, 1),
        ("modernbert", "eager", WINDOWED, 1),
        ("modernbert", "sdpa", WINDOWED, 3),
        ("modernbert", "plain_varlen", VARLEN, 1),
        ("llama", "sdpa", {}, 3),
        ("llama", "sdpa", POSITIONS, 1),
        ("llama", "plain_varlen", VARLEN, 1),
        ("mistral", "sdpa", POSITIONS, 1),
        ("gpt_oss", "eager", FOUND, 1),
    ],
)
def test_a_run_on_packs_equals_one_without_padding(
    tokenizer, rows, tmp_path, kind, attention, options, accumulation
):
    if options is FOUND:
        options = {"model": build(kind, attention)}
    collator = PackingCollator(tokenizer, LENGTH, seed=1, **OPTIONS.get(kind, {}), **options)
    runs = run_both(kind, attention, collator, rows, tmp_path, accumulation=accumulation)
    assert not differences(*runs)


def without_mask(batch):
    return {name: values for name, values in batch.items() if name != "attention_mask"}


def without_restarts(batch):
    return batch | {"position_ids": torch.arange(LENGTH).expand_as(batch["input_ids"])}


@pytest.mark.parametrize(
    "kind, options, change",
    [
        ("bert", {}, without_mask),
        ("roberta", {"first_position": 0}, lambda batch: batch),
        ("llama", {"attention": "positions"}, without_restarts),
    ],
)
def test_the_comparison_sees_what_is_wrong(tokenizer, rows, tmp_path, kind, options, change):
    collator = PackingCollator(tokenizer, LENGTH, seed=1, **{**OPTIONS.get(kind, {}), **options})
    assert "loss" in differences(*run_both(kind, "sdpa", collator, rows, tmp_path, change))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_of_sequences(tokenizer, rows, tmp_path, accumulation):
    """Over micro-batches of unequal predictions, against the mean over sequences in plain torch."""
    collator = PackingCollator(tokenizer, LENGTH, seed=1, per_sequence=True)
    sequences = sequences_of(PackingCollator(tokenizer, LENGTH, seed=1)(rows))
    counts = [sum(label != -100 for label in labels) for _, labels in sequences]
    assert len(set(counts)) > 1
    options = {"accumulation": accumulation, "compute_loss_func": per_sequence_loss}
    packed = train(build("bert"), rows, collator, tmp_path, NUM // accumulation, **options)
    assert not differences(packed, train_alone(build("bert"), sequences, per_sequence=True))
    trainer = make_trainer(build("bert"), rows, collator, tmp_path, NUM, compute_loss_func=per_sequence_loss)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(packed[0][0], rel=1e-5)


@pytest.mark.parametrize("seed", [None, 0])
def test_tokens_are_masked_by_the_rule_of_bert(tokenizer, seed):
    rows = random_rows(400, 3, 59, seed=1)
    torch.manual_seed(0)
    batch = PackingCollator(tokenizer, 64, mlm_probability=0.3, seed=seed)(rows)
    is_predicted = batch["labels"] != -100
    num_words = sum(len(row["input_ids"]) - 2 for row in rows)
    assert is_predicted.sum().item() / num_words == pytest.approx(0.3, abs=0.02)
    tokens, labels = batch["input_ids"][is_predicted], batch["labels"][is_predicted]
    assert (tokens == MASK).double().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (tokens == labels).double().mean().item() == pytest.approx(0.1, abs=0.03)
    assert set(tokens.tolist()) == set(range(VOCAB))  # random ones of the whole vocabulary
    assert not torch.isin(labels, torch.tensor([PAD, CLS, SEP])).any()
    whole = torch.where(is_predicted, batch["labels"], batch["input_ids"])
    found = [tokens for tokens, _ in sequences_of(batch | {"input_ids": whole})]
    assert sorted(found) == sorted(row["input_ids"] for row in rows)


def test_a_column_says_what_is_special(tokenizer):
    row = {"input_ids": [CLS, 5, 6, 7, SEP], "special_tokens_mask": [1, 1, 0, 1, 1]}
    batch = PackingCollator(tokenizer, 8, mlm_probability=1.0)([row])
    assert batch["labels"].tolist() == [[-100, -100, 6, -100, -100, -100, -100, -100]]
    assert "special_tokens_mask" not in batch


def load(rows, collator, num_workers=0, batch_size=NUM):
    """The sequences of an epoch."""
    loader = torch.utils.data.DataLoader(
        rows, batch_size=batch_size, collate_fn=collator, num_workers=num_workers
    )
    return sorted(itertools.chain.from_iterable(map(sequences_of, loader)))


@pytest.mark.filterwarnings(ONE_CPU)
def test_masks_of_a_seed_follow_from_the_sequence(tokenizer):
    rows = random_rows(40, 3, 19)
    collator = PackingCollator(tokenizer, LENGTH, seed=3)
    once = load(rows, collator)
    assert sorted(sequences_of(collator(row for row in rows))) == once  # of a generator
    assert load(rows, collator, num_workers=2, batch_size=7) == once == load(rows[::-1], collator)
    packed = pack_dataset(datasets.Dataset.from_list(rows), LENGTH)
    assert load(packed, collator, batch_size=3) == once
    assert load(rows, PackingCollator(tokenizer, LENGTH, seed=4)) != once


@pytest.mark.filterwarnings(ONE_CPU)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_masks_without_a_seed_are_new_ones(tokenizer, num_workers):
    rows, collator = random_rows(10, 3, 19) * 2, PackingCollator(tokenizer, LENGTH)
    torch.manual_seed(0)
    first, second = (load(rows, collator, num_workers, batch_size=10) for _ in range(2))
    assert first != second  # of two epochs
    assert len({str(one) for one in first}) > 15  # two batches of the same sequences, one a worker
    torch.manual_seed(0)
    assert load(rows, collator, num_workers, batch_size=10) == first


def test_a_whole_data_set_is_packed_by_one_plan(tokenizer, rows, tmp_path):
    dataset = datasets.Dataset.from_list([{**row, "kind": kind} for kind, row in enumerate(rows)])
    packed = pack_dataset(dataset, LENGTH)
    assert isinstance(packed, datasets.Dataset) and len(packed) < NUM
    index = np.array(packed["sequence_index"])
    assert sorted(index[index >= 0].tolist()) == list(range(NUM))
    assert (np.array(packed["kind"])[index >= 0] == index[index >= 0]).all()
    packed, collator = packed.remove_columns("kind"), PackingCollator(tokenizer, LENGTH, seed=1)
    deeper = pack_dataset(datasets.Dataset.from_dict({"input_ids": [[5]] * LENGTH}), LENGTH)
    assert len(collator([packed[0], deeper[0]])["input_ids"]) == 2  # rows of plans of other depths
    run = train(build("bert"), packed, collator, tmp_path, len(packed))
    assert not differences(run, train_alone(build("bert"), sequences_of(collator(rows))))


def test_arguments_of_packing_a_data_set_are_those_of_pack(rows):
    """The seed and the depth that it is given, not the defaults."""
    dataset, found = datasets.Dataset.from_list(rows), set()
    columns = {name: dataset[name][:] for name in dataset.column_names}
    for depth, seed in (("max", 0), ("max", 1), (2, 0)):
        index = np.array(pack_dataset(dataset, LENGTH, depth, seed=seed)["sequence_index"])
        wanted = bert_packed.pack(columns, LENGTH, depth, seed=seed)["sequence_index"]
        np.testing.assert_array_equal(index, wanted)
        found.add(index.tobytes())
    assert len(found) == 3


def test_labels_of_causal_models(tokenizer):
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    collator = PackingCollator(tokenizer, 8, mlm_probability=0)
    ignored = [-100] * 3
    for given in (rows, pack_dataset(datasets.Dataset.from_list(rows), 8)):
        batch = collator(list(given))
        assert sorted(sequences_of(batch)) == [([5, 6, 7], [-100, -100, 7]), ([8, 9], [-100, 9])]
        assert batch["labels"][0, 5:].tolist() == ignored
    batch = collator([{"input_ids": row["input_ids"]} for row in rows])
    assert sorted(sequences_of(batch)) == [([5, 6, 7], [-100, 6, 7]), ([8, 9], [-100, 9])]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")  # by Trainer's default
def test_the_example_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_example(0)
    losses = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    assert len(losses) > 3 and losses[-1] < 0.8 * losses[0]
    assert (tmp_path / "runs/trainer/model.safetensors").exists()
    num_sequences = (np.array(names["packed"]["sequence_index"]) >= 0).sum()
    assert num_sequences == len(names["texts"]) > 3 * len(names["packed"])
