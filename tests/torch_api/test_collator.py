"""Packs for transformers: a run of `Trainer` on packs equals a plain loop over sequences without padding."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[torch]'")
pytest.importorskip("accelerate", reason="pip install -e '.[torch]'")
datasets = pytest.importorskip("datasets", reason="pip install -e '.[torch]'")

from bert_packed.core.settings import InputError  # noqa: E402
from bert_packed.torch import PackingCollator, PerSequenceLoss, pack_dataset  # noqa: E402
from bert_packed.torch.collator import labels_by_sequence  # noqa: E402

LENGTH, VOCAB, NUM = 24, 60, 12
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
MASK = 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(VOCAB - 5))]
    (folder / "vocab.txt").write_text("\n".join(words))
    return transformers.BertTokenizerFast(str(folder / "vocab.txt"))


@pytest.fixture(scope="module")
def rows():
    """Sequences with labels, so that packed and unpacked predict the same."""
    rng = np.random.default_rng(0)
    rows = []
    for number, length in enumerate(rng.integers(3, 12, NUM).tolist()):
        tokens = [2, *rng.integers(5, VOCAB, length).tolist(), 3]
        labels = [-100] * len(tokens)
        for place in rng.choice(np.arange(1, length + 1), number % 3 + 1, replace=False).tolist():
            labels[place], tokens[place] = tokens[place], MASK
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def build(kind, attention="sdpa"):
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=VOCAB, **SIZES, **dropout, max_position_embeddings=LENGTH)
        return transformers.BertForMaskedLM._from_config(config, attn_implementation=attention)
    if kind == "modernbert":  # every second layer sees 4 tokens to each side
        ids = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
        config = transformers.ModernBertConfig(
            vocab_size=VOCAB, **SIZES, **ids, local_attention=8, global_attn_every_n_layers=2
        )
        return transformers.ModernBertForMaskedLM._from_config(config, attn_implementation=attention)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, **SIZES, pad_token_id=0, bos_token_id=2, eos_token_id=3
    )
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention)


def train(model, rows, collator, folder, batch_size, accumulation=1, loss=None):
    """Two steps of plain SGD: losses of the steps, and the weights after them."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=rows if isinstance(rows, datasets.Dataset) else datasets.Dataset.from_list(rows),
        data_collator=collator,
        compute_loss_func=loss,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def train_alone(model, rows, causal=False, per_sequence=False):
    """The same steps by a plain loop over single sequences without padding."""
    model.train()
    losses, num_steps = [], 2
    for _ in range(num_steps):
        nll, counts = [], []
        for row in rows:
            tokens = torch.tensor([row["input_ids"]])
            logits, labels = model(input_ids=tokens).logits[0], torch.tensor(row["labels"])
            if causal:
                logits, labels = logits[:-1], tokens[0, 1:]
            nll.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            counts.append((labels != -100).sum())
        if per_sequence:
            loss = sum(one / count for one, count in zip(nll, counts, strict=True)) / len(rows)
        else:
            loss = sum(nll) / sum(counts)
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for value in model.parameters():
                if value.grad is not None:
                    value -= 0.5 * value.grad
    return losses, dict(model.named_parameters())


def check_equal(one, other):
    losses, weights = one
    want_losses, want = other
    assert len(losses) == 2 and losses[0] != losses[1]
    assert losses == pytest.approx(want_losses, rel=1e-5)
    for name, value in want.items():
        # The gradient of key biases is truly 0
        tolerance = 1e-6 if name.endswith("key.bias") else 1e-5 * value.abs().max().item()
        assert (weights[name] - value).abs().max().item() <= tolerance, name


@pytest.mark.parametrize(
    "kind, attention, given",
    [
        ("bert", "eager", "mask"),
        ("bert", "sdpa", "mask"),
        ("bert", "sdpa", "positions"),
        ("modernbert", "sdpa", "positions"),
        ("llama", "sdpa", "positions"),
    ],
)
def test_a_run_on_packs_equals_one_without_padding(tokenizer, rows, tmp_path, kind, attention, given):
    causal = kind == "llama"
    collator = PackingCollator(tokenizer, LENGTH, None, causal=causal, attention=given)
    batch = collator(rows)
    assert len(batch["input_ids"]) < NUM  # several sequences in a pack
    packed = train(build(kind, attention), rows, collator, tmp_path, NUM)
    check_equal(packed, train_alone(build(kind, attention), rows, causal))


def test_a_model_of_local_attention_needs_positions(tokenizer, rows, tmp_path):
    """A mask is that of all layers: what `PackingCollator` says of ModernBERT."""
    collator = PackingCollator(tokenizer, LENGTH, None, attention="mask")
    packed = train(build("modernbert"), rows, collator, tmp_path, NUM)
    alone = train_alone(build("modernbert"), rows)
    with pytest.raises(AssertionError):
        check_equal(packed, alone)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_of_sequences(tokenizer, rows, tmp_path, accumulation):
    """Over micro-batches of unequal predictions, against the mean over sequences in plain torch."""
    collator = PackingCollator(tokenizer, LENGTH, None, per_sequence=True)
    batch_size = NUM // accumulation
    packed = train(build("bert"), rows, collator, tmp_path, batch_size, accumulation, PerSequenceLoss())
    check_equal(packed, train_alone(build("bert"), rows, per_sequence=True))


def test_a_kernel_of_variable_length_gets_what_it_needs(tokenizer, rows):
    """By plain attention over the ranges that it is given, registered with transformers."""

    def plain(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **given):
        assert attention_mask is None
        scaling = scaling or query.shape[-1] ** -0.5
        flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]  # [B * S, N, H]
        parts, offsets = [], given["cu_seq_lens_q"].tolist()
        assert given["cu_seq_lens_k"].tolist() == offsets and offsets[-1] == len(flat[0])
        for start, end in itertools.pairwise(offsets):
            assert 0 < end - start <= given["max_length_q"] == given["max_length_k"]
            q, k, v = (tensor[start:end].transpose(0, 1) for tensor in flat)
            parts.append((torch.softmax(q @ k.transpose(1, 2) * scaling, -1) @ v).transpose(0, 1))
        return torch.cat(parts).unflatten(0, (len(query), -1)), None

    transformers.AttentionInterface.register("plain_varlen", plain)
    batch = PackingCollator(tokenizer, LENGTH, None, attention="varlen")(rows)
    assert batch["cu_seq_lens_q"].dtype == torch.int32 and isinstance(batch["max_length_q"], int)
    varlen, masked = build("bert", "plain_varlen").eval(), build("bert").eval()
    with torch.no_grad():
        got = varlen(**batch)
        want = masked(**PackingCollator(tokenizer, LENGTH, None)(rows))
    assert torch.allclose(got.loss, want.loss, rtol=1e-5)
    is_real = batch["input_ids"] > 0
    assert torch.allclose(got.logits[is_real], want.logits[is_real], atol=1e-5)


def test_tokens_are_masked_by_the_rule_of_transformers(tokenizer):
    rng = np.random.default_rng(1)
    sequences = [{"input_ids": [2, *rng.integers(5, VOCAB, 20).tolist(), 3]} for _ in range(300)]
    collator = PackingCollator(tokenizer, 64, mlm_probability=0.3, seed=0)
    batch = collator(sequences)
    is_predicted = batch["labels"] != -100
    found = is_predicted.sum().item() / (300 * 20)
    assert found == pytest.approx(0.3, abs=0.02)
    tokens, labels = batch["input_ids"][is_predicted], batch["labels"][is_predicted]
    assert (tokens == MASK).float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (tokens == labels).float().mean().item() == pytest.approx(0.1, abs=0.03)
    assert not torch.isin(labels, torch.tensor([0, 2, 3])).any()  # neither padding nor special tokens
    again = PackingCollator(tokenizer, 64, mlm_probability=0.3, seed=0)(sequences)
    assert torch.equal(batch["labels"], again["labels"])


def test_a_whole_data_set_is_packed_by_one_plan(tokenizer, rows, tmp_path):
    kinds = list(range(NUM))
    dataset = datasets.Dataset.from_list(
        [{**row, "kind": kind} for row, kind in zip(rows, kinds, strict=True)]
    )
    packed = pack_dataset(dataset, LENGTH)
    assert isinstance(packed, datasets.Dataset) and len(packed) < NUM
    index = np.array(packed["sequence_index"])
    assert sorted(index[index >= 0].tolist()) == kinds
    assert (np.array(packed["kind"])[index >= 0] == index[index >= 0]).all()
    packed = packed.remove_columns(["kind"])
    collator = PackingCollator(tokenizer, LENGTH, None)
    run = train(build("bert"), packed, collator, tmp_path, len(packed))
    check_equal(run, train_alone(build("bert"), rows))


def test_labels_of_sequences():
    labels = torch.tensor([[-100, 7, -100, 8, -100], [-100, -100, -100, -100, -100]])
    ids = torch.tensor([[1, 1, 2, 2, 0], [1, 1, 1, 0, 0]])
    assert labels_by_sequence(labels, ids).tolist() == [
        [[-1, 7, -1, -1, -1], [-1, -1, -1, 8, -1]],
        [[-1] * 5, [-100] * 5],
    ]
    logits = torch.zeros(2, 5, 10)
    loss = PerSequenceLoss()({"logits": logits}, labels_by_sequence(labels, ids))
    assert loss.item() == pytest.approx(2 / 3 * np.log(10))


def test_mistakes(tokenizer):
    for options, message in [
        ({"attention": "flash"}, "`attention` must be one of mask, positions, varlen. Received: flash."),
        ({"causal": True, "per_sequence": True}, "`per_sequence` must be False for causal models."),
    ]:
        with pytest.raises(InputError, match=message):
            PackingCollator(tokenizer, LENGTH, **options)
    with pytest.raises(
        InputError, match="sequence 0 must have at most max_seq_length=24 tokens. Received: 30."
    ):
        PackingCollator(tokenizer, LENGTH)([{"input_ids": [5] * 30}])
