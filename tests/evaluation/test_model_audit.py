"""The audit of anybody's model: those that keep sequences apart pass, and each kind of leak fails."""

from types import SimpleNamespace

import numpy as np
import pytest
from reference import import_reference

import bert_packed
from bert_packed.core.settings import InputError

LENGTH, WIDTH = 12, 8
NAMES = ["neighbors: change of outputs", "changed tokens whose own output stays", "unpacked: outputs"]
GRADIENT, WEIGHTS = "neighbors: gradient on their embeddings", "unpacked: gradients of weights"


@pytest.fixture(scope="module")
def packs():
    rng = np.random.default_rng(0)
    sequences = [rng.integers(1, 50, size).tolist() for size in rng.integers(2, 7, 12)]
    packs = bert_packed.pack(sequences, LENGTH)
    assert (packs["sequence_ids"].max(axis=1) > 1).any()
    return packs


def model(leak=""):
    """One layer of attention in NumPy, as a function of a batch; `leak` names what it does wrong."""
    rng = np.random.default_rng(1)
    table, places = rng.normal(size=(60, WIDTH)), rng.normal(size=(LENGTH, WIDTH))

    def attend(batch):
        ids = batch["sequence_ids"]
        positions = np.arange(LENGTH)[None] if "positions" in leak else batch["position_ids"]
        hidden = table[batch["input_ids"]] + places[positions]
        is_own = bert_packed.attention_mask(ids)[:, 0]
        if leak == "no mask":
            is_own = np.ones_like(is_own)
        if leak == "next token":  # of a shifted mask: each token sees the one after it
            is_own = is_own | np.eye(LENGTH, k=1, dtype=bool)
        scores = np.where(is_own, hidden @ np.swapaxes(hidden, 1, 2), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        if leak == "soft mask":  # in float64 alone
            scores = np.where(is_own, hidden @ np.swapaxes(hidden, 1, 2), -10.0)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
        if leak == "ignores input":
            return np.zeros_like(hidden)
        if leak == "NaN":
            return np.where(ids[..., None] == 2, np.nan, hidden)
        states = weights / weights.sum(-1, keepdims=True) @ hidden
        other_rows = states + np.roll(states, 1, axis=0) * (ids[..., None] == 1)
        if leak == "equal slots":
            return other_rows
        if leak == "start_logits":
            return {"start_logits": other_rows[..., 0], "hidden_states": states}
        if leak == "positions beside infinity":  # of tokens that are never predicted
            return np.concatenate([states, np.full_like(states, -np.inf)], axis=-1)
        if leak == "hidden_states":
            return {"logits": states, "hidden_states": (states, other_rows)}
        return states

    return attend


def failed(report):
    return [check.name for check in report.checks if not check.passed]


@pytest.mark.parametrize(
    "names", [("input_ids", "sequence_ids", "position_ids"), ("input_ids", "sequence_ids")]
)
def test_a_model_that_keeps_sequences_apart(packs, names):
    report = bert_packed.audit_model(model(), {name: packs[name] for name in names})
    assert [check.name for check in report.checks] == NAMES
    assert report.passed and str(report).count("pass  ") == 3


@pytest.mark.parametrize(
    "leak, found",
    [
        ("no mask", [0, 2]),
        ("next token", [0, 2]),
        ("positions", [2]),
        ("ignores input", [1]),
        ("NaN", [0, 2]),
        ("soft mask", [0]),
        ("positions beside infinity", [2]),
        ("equal slots", [0, 2]),
        ("start_logits", [0, 2]),
        ("hidden_states", [0, 2]),
    ],
)
def test_leaks_are_found(packs, leak, found):
    report = bert_packed.audit_model(model(leak), packs)
    assert failed(report) == [NAMES[number] for number in found] and not report.passed
    assert "FAIL" in str(report)


def test_a_leak_into_one_place_is_found_wherever_it_is():
    full = bert_packed.pack([[7, 8, 9, 6, 5], [11, 12, 13, 14, 15, 16, 17]], LENGTH)
    assert full["sequence_ids"].all()
    for place in range(LENGTH):

        def leaks(batch, place=place):
            ids, hidden = batch["sequence_ids"], model()(batch)
            others = (ids > 0) & (ids != ids[:, [place]]) & (ids[:, [place]] > 0)
            hidden[:, place] += (batch["input_ids"] * others).sum(axis=1, keepdims=True)
            return hidden

        assert failed(bert_packed.audit_model(leaks, full)) == [NAMES[0], NAMES[2]], place


def test_mistakes(packs):
    rng = np.random.default_rng(2)
    alone = {name: values[:, :LENGTH] for name, values in bert_packed.pack([[1] * 12, [2] * 12], 12).items()}
    numbered = {**alone, "sequence_ids": np.array([[7] * 12, [9] * 12])}  # of documents, one in each row
    split = {**packs, "sequence_ids": np.where(np.arange(LENGTH) % 3 == 1, 1, 2) + 0 * packs["sequence_ids"]}
    for wrong, what, message in [
        (model(), alone, "`packs` must hold several sequences in one of them"),
        (model(), numbered, "`packs` must hold several sequences in one of them"),
        (model(), split, "`packs` must have each of sequence_ids in one run of a row"),
        (model(), {"input_ids": packs["input_ids"]}, r"`packs` must have sequence_ids \[B, S\]"),
        (model(), {**packs, "kind": packs["input_ids"][:, :3]}, "every column of `packs` must have the sh"),
        (model(), {**packs, "sequence_ids": packs["sequence_index"]}, "every column of `packs` must have"),
        (lambda batch: rng.normal(size=batch["input_ids"].shape), packs, "`model` must give equal outputs"),
        (lambda batch: np.zeros(3), packs, r"`model` must return an array that begins with \[\d+, 12\]"),
        (lambda batch: batch["input_ids"] * 1j, packs, r"`model` must return real numbers\. Received: array"),
        (None, packs, r"`model` must be a function, a Keras model or a torch\.nn\.Module\. Received: None"),
    ]:
        with pytest.raises(ValueError, match=message):
            bert_packed.audit_model(wrong, what)
    for options, message in [
        ({"inputs": 5}, r"`inputs` must be a function or None\. Received: 5"),
        ({"alone": 5}, r"`alone` must be a function or None\. Received: 5"),
        (
            {"inputs": lambda batch: {}},
            r"`model` must take these inputs\. Received: KeyError: 'sequence_ids'",
        ),
        ({"tolerance": np.nan}, r"`tolerance` must be a number from 0, or None\. Received: nan"),
    ]:
        with pytest.raises(InputError, match=message):
            bert_packed.audit_model(model(), packs, **options)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "float16", "bfloat16", "longdouble"])
def test_outputs_of_any_type(packs, dtype):
    """Differences of bools and of small integers fail or overflow in their own type."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16

    def bits(batch):
        found = (batch["input_ids"][..., None] >> np.arange(8)) & 1
        return (found * 128).astype(dtype)  # -128 in int8, whose absolute value is -128

    def with_the_last(batch):
        return np.concatenate([bits(batch), np.roll(bits(batch), 1, axis=1)], axis=-1)

    assert bert_packed.audit_model(bits, packs).passed
    assert failed(bert_packed.audit_model(with_the_last, packs)) == [NAMES[0], NAMES[2]]


@pytest.fixture(scope="module")
def reference():
    torch, transformers = import_reference()
    torch.manual_seed(0)
    return torch, transformers


def test_transformers_bert(packs, reference):
    torch, transformers = reference
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=60, **sizes, max_position_embeddings=LENGTH)
    bert = transformers.BertModel(config).eval()
    report = bert_packed.audit_model(bert, packs)
    assert report.passed and GRADIENT in str(report) and WEIGHTS in str(report)

    def padding_mask(batch):
        mask = (batch["sequence_ids"] > 0).astype("int64")
        return {
            "input_ids": batch["input_ids"],
            "position_ids": batch["position_ids"],
            "attention_mask": mask,
        }

    report = bert_packed.audit_model(bert, packs, inputs=padding_mask)
    assert failed(report) == [NAMES[0], GRADIENT, NAMES[2], WEIGHTS]
    bert.get_input_embeddings().requires_grad_(False)  # as with adapters
    assert len(failed(bert_packed.audit_model(bert, packs, inputs=padding_mask))) == 4
    assert bert_packed.audit_model(bert.bfloat16(), packs).passed
    bert.float()
    bert.get_input_embeddings().requires_grad_(True)

    with pytest.raises(InputError, match="without dropout"):
        bert_packed.audit_model(bert.train(), packs)
    with pytest.raises(InputError, match="`inputs` must be given for a model whose `forward`"):
        bert_packed.audit_model(torch.nn.Embedding(60, 4), packs)
    heads = transformers.BertForPreTraining(config).eval()
    assert bert_packed.audit_model(heads, packs).passed  # outputs of other names
    classifier = transformers.BertForSequenceClassification(config).eval()
    with pytest.raises(InputError, match=r"head for whole sequences, audit `model\.base_model`"):
        bert_packed.audit_model(classifier, packs)


def gradient_of_the_token_before(module, hidden):
    past = hidden.roll(1, dims=1)
    return hidden + (past - past.detach())  # exactly 0 forward


def gradient_of_the_place(module, hidden):
    zero = module.embedding.weight - module.embedding.weight.detach()
    return hidden + zero[0] * hidden.detach().cumsum(1)


def training_sees_the_pack(module, hidden):
    return module.dropout(hidden) + module.training * hidden.mean(1, keepdim=True)


def training_is_random(module, hidden):
    return hidden + module.training * hidden.new_zeros(()).uniform_()


def training_drops(module, hidden):
    module.calls += module.training
    assert not module.training or module.config.some_dropout == 0
    return module.dropout(hidden)


def head_hides_a_leak(module, hidden):
    return {"logits": hidden, "hidden_states": (hidden.mean(1, keepdim=True) + hidden,)}


@pytest.mark.parametrize(
    "forward, found",
    [
        (gradient_of_the_token_before, [GRADIENT, WEIGHTS]),
        (gradient_of_the_place, [WEIGHTS]),
        (
            training_sees_the_pack,
            [f"training mode: {one}" for one in (NAMES[0], GRADIENT, NAMES[2], WEIGHTS)],
        ),
        (training_is_random, ["training mode: change from call to call"]),
        (training_drops, []),
        (head_hides_a_leak, [NAMES[0], GRADIENT, NAMES[2], WEIGHTS]),
    ],
)
def test_leaks_of_torch_modules(packs, reference, forward, found):
    torch, _ = reference

    class Model(torch.nn.Module):
        config = SimpleNamespace(output_hidden_states=False, some_dropout=0.5)

        def __init__(self):
            super().__init__()
            self.embedding, self.dropout = torch.nn.Embedding(60, WIDTH), torch.nn.Dropout(0.5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, input_ids, output_hidden_states):
            assert output_hidden_states
            return forward(self, self.embedding(input_ids))

        def get_input_embeddings(self):
            return self.embedding

    module = Model().eval()
    assert failed(bert_packed.audit_model(module, packs)) == found
    assert (module.training, module.dropout.training, module.dropout.p) == (False, False, 0.5)
    assert module.calls == 0 and module.config.some_dropout == 0.5


@pytest.mark.parametrize(("attention", "is_right"), [("positions", True), ("mask", False)])
def test_a_collator_gives_the_inputs(packs, reference, attention, is_right):
    """Mistral's local attention is no part of the one mask."""
    from transformers_models import build, make_tokenizer

    from bert_packed.torch import PackingCollator

    collator = PackingCollator(make_tokenizer(), LENGTH, None, attention=attention)
    report = bert_packed.audit_model(build("mistral", "eager").eval(), packs, inputs=collator)
    assert report.passed == is_right and (is_right or NAMES[2] in failed(report))


def test_a_model_alone_is_given_what_is_asked(packs):
    def of_columns(batch):
        return model()(batch) if "kind" in batch else np.zeros((*batch["input_ids"].shape, WIDTH))

    given = packs | {"kind": packs["input_ids"]}
    assert bert_packed.audit_model(of_columns, given).passed
    report = bert_packed.audit_model(
        of_columns, given, alone=lambda columns: {"input_ids": columns["input_ids"]}
    )
    assert failed(report) == [NAMES[2]]


@pytest.mark.parametrize("width, name", [(LENGTH, "pooled"), (8, "pooled"), (LENGTH, "")])
def test_pooled_states_as_long_as_packs_are_no_values_of_tokens(packs, width, name):
    """By their name, or by states of the same width in a tuple."""

    def with_pooled(batch):
        states, pooled = model()(batch), np.ones((len(packs["input_ids"]), width)) * batch["input_ids"].sum()
        return {"states": states, name: pooled} if name else (np.tile(states, 2)[..., :width], pooled)

    assert bert_packed.audit_model(with_pooled, packs).passed


def test_a_keras_model(packs):
    keras = pytest.importorskip("keras")
    ids = keras.Input((LENGTH,), dtype="int32", name="input_ids")
    sequences = keras.Input((LENGTH,), dtype="int32", name="sequence_ids")
    hidden = keras.layers.Embedding(60, WIDTH)(ids)
    mask = keras.layers.Lambda(lambda ids: bert_packed.attention_mask(ids)[:, 0])(sequences)
    attention = keras.layers.MultiHeadAttention(2, 4)
    own = keras.Model([ids, sequences], attention(hidden, hidden, attention_mask=mask))
    leaks = keras.Model([ids, sequences], attention(hidden, hidden))

    def inputs(batch):
        return [batch["input_ids"].astype("int32"), batch["sequence_ids"].astype("int32")]

    assert bert_packed.audit_model(own, packs, inputs=inputs).passed
    assert failed(bert_packed.audit_model(leaks, packs, inputs=inputs)) == [NAMES[0], NAMES[2]]
    named = {"input_ids": ids, "sequence_ids": sequences}  # not all of the columns of `packs`
    assert bert_packed.audit_model(keras.Model(named, {"states": own.output}), packs).passed
    tokens = keras.Input((LENGTH,), dtype="int32", name="token_ids")
    other = keras.Model({"token_ids": tokens}, keras.layers.Embedding(60, WIDTH)(tokens))
    with pytest.raises(InputError, match="`inputs` must be given for a model whose inputs are not all in"):
        bert_packed.audit_model(other, packs)
