"""Tiny models of every architecture and head, and the models of transformers that have their settings."""

import dataclasses
import functools
import warnings

import next_tokens
import numpy as np
import tiny
from modern_bert_models import CONFIG as MODERN_BERT
from packs import VOCAB_SIZE, batch_of, random_sequence
from reference import import_reference

from bert_packed.architectures.mamba.config import MambaConfig
from bert_packed.architectures.mamba2.config import Mamba2Config
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import (
    CLASSIFICATION,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
    model_type,
)
from bert_packed.checkpoints import checkpoint, export_formats, starting_weights
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.engines.engine import named_weights

NUM_CLASSES = 3
BERT = tiny.CONFIG
SHAPE = {"vocab_size": VOCAB_SIZE, "hidden_size": 12, "num_hidden_layers": 2, "state_size": 5}
MAMBA = MambaConfig(**SHAPE, time_step_rank=3, use_bias=True)
MAMBA2 = Mamba2Config(**SHAPE, head_dim=4, n_groups=1, chunk_size=4, use_conv_bias=False)
GROUPS = Mamba2Config(
    **SHAPE,
    head_dim=4,
    n_groups=3,
    chunk_size=4,
    use_bias=True,
    tie_word_embeddings=False,
    time_step_limit_min=0.3,
    time_step_limit_max=1.5,
)
BIASES = dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)
MEANS = dataclasses.replace(MODERN_BERT, classifier_pooling="mean")
# Each model has a config and a head
CASES = {
    "bert": (BERT, PRETRAINING),
    "bert mlm": (BERT, MASKED_LM),
    "bert answers": (BERT, QUESTION_ANSWERING),
    "bert classes": (BERT, CLASSIFICATION),
    "bert tags": (BERT, TOKEN_CLASSIFICATION),
    "modernbert": (MODERN_BERT, MASKED_LM),
    "modernbert all biases": (dataclasses.replace(MODERN_BERT, **BIASES), MASKED_LM),
    "modernbert no decoder bias": (dataclasses.replace(MODERN_BERT, decoder_bias=False), MASKED_LM),
    "modernbert answers": (MODERN_BERT, QUESTION_ANSWERING),
    "modernbert classes": (MODERN_BERT, CLASSIFICATION),
    "modernbert classes of means": (MEANS, CLASSIFICATION),
    "modernbert tags": (MODERN_BERT, TOKEN_CLASSIFICATION),
    "mamba": (MAMBA, CAUSAL_LM),
    "mamba no biases": (dataclasses.replace(MAMBA, use_bias=False, use_conv_bias=False), CAUSAL_LM),
    "mamba2": (MAMBA2, CAUSAL_LM),
    "mamba2 groups": (GROUPS, CAUSAL_LM),
}
NAMES_THERE = {"bert": "Bert", "modernbert": "ModernBert", "mamba": "Mamba", "mamba2": "Mamba2"}
# Outputs have these names here and in transformers
OUTPUTS = {
    PRETRAINING: {"mlm_logits": "prediction_logits", "nsp_logits": "seq_relationship_logits"},
    MASKED_LM: {"mlm_logits": "logits"},
    QUESTION_ANSWERING: {"start_logits": "start_logits", "end_logits": "end_logits"},
}
# Sequences fill a pack, leave padding behind others, or are shorter than the four taps of a convolution and
# longer than a window; they begin at every place of a Mamba-2's chunk of four tokens
LENGTHS = [[5, 1, 3, 9, 2], [3, 14, 7], [24], [6, 1, 16], [8, 8, 2, 1]]
MAX_SEQ_LENGTH, NUM_SLOTS = 24, 5


def make_model(case, seed=1):
    """A model of a case with random values in every tensor."""
    config, head = CASES[case]
    return randomize(build_model(head, config, num_outputs=NUM_CLASSES, seed=seed), seed)


def randomize(model, seed=1):
    """Add random values to every tensor; returns the model."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        weight.assign(np.asarray(weight) + rng.normal(size=weight.shape, scale=0.2))
    return model


def write_model(folder, model, form):
    """Write a model as a checkpoint, "ours" or "hf" (Hugging Face); return the folder."""
    folder.mkdir(exist_ok=True)
    if form == "ours":
        checkpoint.save_weights(folder, named_weights(model), model.config)
    else:
        export_formats.write_hugging_face(folder, model, named_weights(model))
    return folder


def assert_equal_weights(one, other):
    one, other = (named_weights(model) for model in (one, other))
    assert one.keys() == other.keys()
    for name, variable in one.items():
        np.testing.assert_array_equal(variable.numpy(), other[name].numpy(), err_msg=name)


def transformers_config(config, **changes):
    """The same settings as a config of transformers."""
    _, transformers = import_reference()
    settings = dataclasses.asdict(config)
    if model_type(config) == "modernbert":
        settings |= dict.fromkeys(f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep"))
    if model_type(config) == "mamba2":
        least, most = settings.pop("time_step_limit_min"), settings.pop("time_step_limit_max")
        settings |= {"time_step_limit": (least, most or float("inf")), "num_heads": config.num_heads}
    settings = {name: value for name, value in settings.items() if not name.startswith("ablation")}
    return getattr(transformers, f"{NAMES_THERE[model_type(config)]}Config")(**settings, **changes)


def transformers_class(case):
    """The name of the class of transformers that has a case's head, as its documentation has it."""
    config, head = CASES[case]
    tasks = {
        PRETRAINING: "PreTraining",
        MASKED_LM: "MaskedLM",
        QUESTION_ANSWERING: "QuestionAnswering",
        CLASSIFICATION: "SequenceClassification",
        TOKEN_CLASSIFICATION: "TokenClassification",
        CAUSAL_LM: "CausalLM",
    }
    return f"{NAMES_THERE[model_type(config)]}For{tasks[head]}"


def make_reference(case):
    """A model of transformers in which every tensor is random, those that start at 0 or 1 too."""
    torch, transformers = import_reference()
    config, head = CASES[case]
    torch.manual_seed(0)
    changes = {"num_labels": NUM_CLASSES} if head in (CLASSIFICATION, TOKEN_CLASSIFICATION) else {}
    model = getattr(transformers, transformers_class(case))(transformers_config(config, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model


def load_reference(folder, case, **build):
    """Our model of a case with the weights in a folder that transformers wrote."""
    config, head = CASES[case]
    model = build_model(head, config, num_outputs=NUM_CLASSES, seed=2, **build)
    found = starting_weights.load(folder, named_weights(model), config, head)
    assert (found.missing, found.unused, found.changed) == ([], [], [])
    assert found.num_used == len(named_weights(model))
    return model


@functools.cache
def draw_packs():
    """Packs of `LENGTHS`: lists of `Sequence`, which predict every token."""
    rng = np.random.default_rng(0)
    return [[random_sequence(rng, length, num_predictions=length) for length in pack] for pack in LENGTHS]


def make_batch(head):
    """The packs as a batch for models of a head."""
    if head == CAUSAL_LM:
        packs = [[sequence.tokens for sequence in pack] for pack in draw_packs()]
        batch = next_tokens.batch_of(packs, MAX_SEQ_LENGTH, NUM_SLOTS)
    else:
        batch = batch_of(draw_packs(), MAX_SEQ_LENGTH, NUM_SLOTS, num_predictions=MAX_SEQ_LENGTH)
    assert batch["sequence_ids"].max(axis=1).tolist() == [5, 3, 1, 3, 4]
    return batch


def run_alone(reference, case, sequence):
    """Outputs of a model of transformers for one sequence, by our names: dict of tensors of torch."""
    torch, _ = import_reference()
    config, head = CASES[case]
    given = {"input_ids": torch.tensor([sequence.tokens])}
    if model_type(config) == "bert":
        given["token_type_ids"] = torch.tensor([sequence.token_types])
    outputs = reference(**given)
    return {ours: outputs[theirs][0] for ours, theirs in OUTPUTS.get(head, {"logits": "logits"}).items()}


def compare(forward, reference, case):
    """The largest differences of outputs, each as a share of the output's largest value.

    `forward` is a function from a batch to our outputs. Returns an array with a row for each sequence and a
    column for each output.
    """
    torch, _ = import_reference()
    head = CASES[case][1]
    batch = make_batch(head)
    got = {name: np.asarray(values) for name, values in forward(batch).items()}
    found, largest = [], dict.fromkeys(got, 0.0)
    for row, slot in np.argwhere(batch["slot_weights"]):
        with torch.no_grad():
            alone = run_alone(reference, case, draw_packs()[row][slot])
        assert alone.keys() == got.keys()
        for name, want in alone.items():
            owners = "prediction_sequences" if name == "mlm_logits" else "sequence_ids"
            is_pooled = name == "nsp_logits" or head == CLASSIFICATION
            ours = got[name][row][slot if is_pooled else batch[owners][row] == slot + 1]
            assert ours.shape == want.shape
            found.append(np.abs(ours - want.numpy()).max())
            largest[name] = max(largest[name], want.abs().max().item())
    assert len(found) == 16 * len(got)
    return np.reshape(found, (16, -1)) / list(largest.values())


def load_transformers(case, folder):
    """The model that transformers opens in a folder, which must have each of its tensors and no other."""
    _, transformers = import_reference()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of its own files
        kind = getattr(transformers, transformers_class(case))
        model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()
