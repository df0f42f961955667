"""Every architecture, head and direction against transformers: weights in, outputs, gradients, weights out.

This file alone catches a tensor under another's name or transposed, a formula that is not the published one,
and a setting that an export leaves to a default. The models of transformers compute each sequence alone.
"""

import dataclasses
import functools
import itertools
import json
import shutil

import checkpoint_cases
import next_tokens
import numpy as np
import pytest
from checkpoint_cases import CASES
from reference import import_reference
from safetensors.numpy import load_file, save_file

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import (
    EMBEDDING,
    FAMILIES,
    MASKED_LM,
    MODEL_SIZES,
    family_of,
    load_model_config,
    model_type,
)
from bert_packed.checkpoints import starting_weights
from bert_packed.checkpoints.export_formats import write_hugging_face
from bert_packed.objectives.pretraining import masked_lm_objective, next_token_objective
from bert_packed.schema import CAUSAL_LM
from bert_packed.training import engines
from bert_packed.training.backend import compiled
from bert_packed.training.engines.engine import named_weights

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled_file")]
TOLERANCE = {"bert": 2e-5, "modernbert": 1e-5, "mamba": 1e-5, "mamba2": 2e-5}  # of the largest value
LEARNING = [name for name, (_, head) in CASES.items() if head in (MASKED_LM, CAUSAL_LM)]
SLOW = ("mamba", "mamba no biases", "modernbert no decoder bias")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    @functools.cache
    def make(case):
        folder = tmp_path_factory.mktemp("theirs")
        reference = checkpoint_cases.make_reference(case)
        reference.save_pretrained(folder)
        return folder, reference, checkpoint_cases.load_reference(folder, case)

    return make


def tolerance_of(case):
    return TOLERANCE[model_type(CASES[case][0])]


def test_the_grid_has_every_head_of_every_architecture():
    heads = {(model_type(config), head) for config, head in CASES.values()}
    # tests/tasks/test_embed_references.py has a model without a head's layers
    known = {(name, head) for name, family in FAMILIES.items() for head in family.heads}
    assert heads == {(name, head) for name, head in known if head != EMBEDDING}


@pytest.mark.parametrize("case", CASES)
def test_packs_give_what_transformers_gives(both, case):
    folder, reference, model = both(case)
    config, head = CASES[case]
    assert starting_weights.read_config(folder) == config
    assert starting_weights.stored_head(folder)[0] == head
    forward = compiled(lambda batch: model(batch), model)
    assert checkpoint_cases.compare(forward, reference, case).max() <= tolerance_of(case)


@pytest.mark.parametrize("case", CASES)
def test_weights_go_back_as_they_came(both, tmp_path, case):
    """Every tensor bit for bit, and every setting, since defaults change from version to version."""
    folder, reference, model = both(case)
    write_hugging_face(tmp_path, model, named_weights(model))
    before, after = (load_file(where / "model.safetensors") for where in (folder, tmp_path))
    tied = {copy for copy, _ in family_of(model.config).load_names().tied}
    assert after.keys() <= before.keys() and before.keys() - after.keys() <= tied
    for name, values in after.items():
        np.testing.assert_array_equal(values, before[name], err_msg=name)
    again = checkpoint_cases.load_transformers(case, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == [type(reference).__name__]
    for name in {*vars(reference.config)} & {*written} - {"dtype", "architectures"}:
        if name.endswith("_token_id"):  # those of a vocabulary, if one is exported
            continue
        received, wanted = getattr(again.config, name), getattr(reference.config, name)
        if name == "time_step_limit":  # JSON has no infinity
            wanted = np.clip(wanted, 0, np.finfo(np.float32).max)
        assert np.array_equal(received, wanted), name


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in LEARNING]
)
def test_loss_and_every_gradient_equal(both, tmp_path, case):
    """The mean over predictions: theirs from one sequence after another, ours from the packs at once."""
    torch, _ = import_reference()
    folder, reference, model = both(case)
    head = CASES[case][1]
    objective = next_token_objective("per_token") if head == CAUSAL_LM else masked_lm_objective("per_token")
    engine = engines.make_engine(model, objective, micro_batch_size=None if head == CAUSAL_LM else 2)
    gradients, sums = compiled(functools.partial(engine.gradients, training=False), model)(
        padded(checkpoint_cases.make_batch(head))
    )
    total = num_predictions = 0
    reference.zero_grad()
    for sequence in itertools.chain(*checkpoint_cases.draw_packs()):
        (logits,) = checkpoint_cases.run_alone(reference, case, sequence).values()
        labels = torch.tensor(sequence.tokens if head == CAUSAL_LM else sequence.prediction_ids)
        if head == CAUSAL_LM:
            logits, labels = logits[:-1], labels[1:]
        num_predictions += len(labels)
        if len(labels):
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            loss.backward()
            total += loss.item()
    loss_name = "lm_nll" if head == CAUSAL_LM else "mlm_loss"
    assert float(sums[loss_name]) == pytest.approx(total, rel=1e-5)
    assert_gradients_equal(engine, gradients, reference, num_predictions, folder, tmp_path, case)


def padded(batch):
    return {name: np.concatenate([values, np.zeros_like(values[:1])]) for name, values in batch.items()}


def assert_gradients_equal(engine, gradients, reference, denominator, folder, tmp_path, case):
    """Compare all gradients; theirs find our names as weights do, by a checkpoint that holds them."""
    theirs = {name: parameter.grad.numpy() for name, parameter in reference.named_parameters()}
    shutil.copy(folder / "config.json", tmp_path)
    save_file({name: values / denominator for name, values in theirs.items()}, tmp_path / "model.safetensors")
    wanted = checkpoint_cases.load_reference(tmp_path, case).trainable_variables
    variables = engine.model.trainable_variables
    assert len(gradients) == len(wanted) == len(variables)
    for variable, gradient, want in zip(variables, gradients, wanted, strict=True):
        want, gradient = want.numpy(), np.asarray(gradient)
        assert gradient.shape == want.shape, variable.path
        if variable.path.endswith("key/bias"):  # truly 0: it moves no softmax
            assert max(np.abs(gradient).max(), np.abs(want).max()) <= 1e-6, variable.path
        else:
            difference = np.abs(gradient - want).max()
            assert difference <= tolerance_of(case) * np.abs(want).max(), variable.path


@pytest.mark.parametrize("cut", [1, 2, 9])
def test_a_sequence_cut_across_packs_equals_theirs_with_a_cache(both, tmp_path, cut, case="mamba2 groups"):
    """Loss and every gradient of the second pack; the first is data, as a detached cache is.

    The Mamba-1 of transformers takes one token with a cache, not several.
    """
    torch, _ = import_reference()
    folder, reference, _ = both(case)
    model = checkpoint_cases.load_reference(folder, case, num_rows=1)
    tokens = np.random.default_rng(3).integers(1, 31, 21).tolist()
    whole = next_tokens.batch_of([[tokens]], 21, 1)
    engine = engines.make_engine(model, next_token_objective("per_token", goes_on=True))
    for place in (slice(cut), slice(cut, None)):
        part = {name: values[:, place] if values.shape[1] == 21 else values for name, values in whole.items()}
        gradients, sums = engine.gradients(part, training=True)
    reference.zero_grad()
    with torch.no_grad():
        cache = reference(input_ids=torch.tensor([tokens[:cut]]), use_cache=True).cache
    logits = reference(input_ids=torch.tensor([tokens[cut:]]), cache=cache, use_cache=True).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[cut + 1 :]), reduction="sum")
    loss.backward()
    assert float(sums["lm_nll"]) == pytest.approx(loss.item(), rel=1e-5)
    assert_gradients_equal(engine, gradients, reference, 20 - cut, folder, tmp_path, case)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("modernbert", {"local_rope_theta": 5000.0}),
        ("modernbert", {"local_attention": 12}),
        ("mamba2 groups", {"time_step_limit_max": 0.4}),
    ],
)
def test_the_comparison_sees_a_fault(both, case, changes):
    _, reference, model = both(case)
    other = build_model(model.head, dataclasses.replace(model.config, **changes), 1)
    for ours, theirs in zip(other.weights, model.weights, strict=True):
        ours.assign(theirs)
    assert checkpoint_cases.compare(other, reference, case).max() > 100 * tolerance_of(case)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("bert-base", 110_106_428),
        ("modernbert-base", 149_655_232),
        ("modernbert-large", 395_881_664),
        ("mamba2-130m", 128_989_632),
    ],
)
def test_published_sizes_have_the_published_parameters(tmp_path, name, num_parameters):
    torch, transformers = import_reference()
    config = MODEL_SIZES[name]
    case = next(case for case, (one, _) in CASES.items() if type(one) is type(config))
    with torch.device("meta"):
        kind = getattr(transformers, checkpoint_cases.transformers_class(case))
        model = kind(checkpoint_cases.transformers_config(config))
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    model.config.save_pretrained(tmp_path)
    assert load_model_config(tmp_path / "config.json") == config
