"""Other files of Hugging Face and Google than those of today: every tensor in its place, or named.

This file alone catches an older spelling, a tied copy or a split file that is no longer read.
"""

import dataclasses
import json
import re

import foreign_checkpoints
import numpy as np
import pytest
from checkpoint_cases import CASES, make_model, write_model
from foreign_checkpoints import ONE_LAYER, google_tensors, write_google
from packs import VOCAB_SIZE
from safetensors.numpy import load_file, save_file

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import PRETRAINING
from bert_packed.checkpoints import pretrained_files, starting_weights
from bert_packed.core.settings import InputError
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
# Prefix of the encoder, its table of words, and the name of a copy of that
MODELS = {
    "bert": ("bert.", "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    "modernbert": ("model.", "model.embeddings.tok_embeddings.weight", "decoder.weight"),
    "mamba": ("backbone.", "backbone.embeddings.weight", "lm_head.weight"),
}
OLD_SPELLINGS = {
    "bert": {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    "modernbert": {},
    "mamba": {"embeddings.weight": "embedding.weight"},
}


def new_weights(config, head):
    weights = named_weights(build_model(head, config, seed=1))
    for variable in weights.values():
        variable.assign(np.full(variable.shape, 0.5, np.float32))
    return weights


def write_hugging_face(folder, kind):
    """Write a random model; returns its tensors by our names and by theirs."""
    model = make_model(kind)
    write_model(folder, model, "hf")
    ours = {name: variable.numpy() for name, variable in named_weights(model).items()}
    return ours, load_file(folder / "model.safetensors")


def assert_loaded(weights, tensors):
    assert weights.keys() == tensors.keys()
    for name, variable in weights.items():
        np.testing.assert_array_equal(variable.numpy(), tensors[name], err_msg=name)


def whole(kind, theirs):
    """Add copies of tied tensors, and tensors of which no model has any."""
    _, words, copy = MODELS[kind]
    theirs[copy] = theirs[words].copy()
    if kind == "bert":
        theirs["cls.predictions.decoder.bias"] = theirs["cls.predictions.bias"].copy()
    theirs["a.position_ids"] = np.arange(24, dtype=np.int64)[None]
    theirs["score.weight"] = np.zeros((2, 16), np.float32)
    return theirs


def copies_alone(kind, theirs):
    _, words, copy = MODELS[kind]
    theirs[copy] = theirs.pop(words)
    if kind == "bert":
        theirs["cls.predictions.decoder.bias"] = theirs.pop("cls.predictions.bias")
    return theirs


def oldest(kind, theirs):
    """A bare encoder in the first spelling, in half precision."""
    prefix, bare = MODELS[kind][0], {}
    for name, values in theirs.items():
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            for new, old in OLD_SPELLINGS[kind].items():
                name = name.replace(new, old)
            bare[name] = values.astype(np.float16)
    return bare


@pytest.mark.parametrize("change", [whole, copies_alone, oldest])
@pytest.mark.parametrize("kind", MODELS)
def test_hugging_face(tmp_path, kind, change):
    config, head = CASES[kind]
    ours, theirs = write_hugging_face(tmp_path, kind)
    weights = new_weights(config, head)
    save_file(change(kind, theirs), tmp_path / "model.safetensors")
    found = starting_weights.load(tmp_path, weights, config)
    assert found.unused == (["a.position_ids", "score.weight"] if change is whole else [])
    assert not found.unused or "a.position_ids, score.weight" in "\n".join(found.lines())
    if change is oldest:
        heads = [name for name in ours if name.startswith(("predictions/", "next_sentence/classifier/"))]
        assert sorted(found.missing) == sorted(heads) and ", ".join(found.missing) in found.lines()[-1]
        ours = {name: values.astype(np.float16) for name, values in ours.items()}
        ours |= {name: np.full_like(ours[name], 0.5) for name in heads}
        read = pretrained_files.HuggingFaceCheckpoint(tmp_path).read(config, head)
        assert {values.dtype.name for values in read.tensors.values()} == {"float32"}
    else:
        assert (found.missing, found.num_used) == ([], len(ours))
    assert_loaded(weights, ours)


@pytest.mark.parametrize("form", ["prefix", "folder", "saved_model"])
def test_google(tmp_path, form):
    google, weights = google_tensors(), new_weights(ONE_LAYER, PRETRAINING)
    google |= {"global_step": np.int64(7), "bert/pooler/dense/bias/adam_m": np.zeros(16, np.float32)}
    google["_CHECKPOINTABLE_OBJECT_GRAPH"] = np.zeros(1, np.float32)  # no tensor that a user would miss
    prefix = path = write_google(tmp_path, google)
    if form != "prefix":
        path = prefix.parent
    if form == "saved_model":
        (path / "variables").mkdir()
        for file in path.glob("bert_model.ckpt*"):
            file.rename(path / "variables" / file.name.replace("bert_model.ckpt", "variables"))
    found = starting_weights.load(path, weights, ONE_LAYER)
    ours = named_weights(foreign_checkpoints.make_model())
    assert_loaded(weights, {name: variable.numpy() for name, variable in ours.items()})
    assert found.unused == ["bert/pooler/dense/bias/adam_m", "global_step"]
    # The tensors are checked by this config, which is one folder up for a SavedModel
    assert starting_weights.read_config(path) == ONE_LAYER


def test_weights_in_several_files(tmp_path):
    ours, theirs = write_hugging_face(tmp_path, "mamba")
    weights = new_weights(*CASES["mamba"])
    (tmp_path / "model.safetensors").unlink()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    places = {name: files[number % 2] for number, name in enumerate(theirs)}
    for file in files:
        save_file({name: theirs[name] for name in theirs if places[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    assert starting_weights.stored_head(tmp_path) == (CAUSAL_LM, VOCAB_SIZE)
    found = starting_weights.load(tmp_path, weights, CASES["mamba"][0])
    assert_loaded(weights, ours)
    assert found.path == index
    (tmp_path / files[1]).unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00002\.safetensors must be a complete"):
        starting_weights.load(tmp_path, weights, CASES["mamba"][0])


NAMES = ("../x.safetensors", "/x.safetensors", "", "a\0.safetensors", None, 5, ["x"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (
                {"weight_map": {"t": name}},
                f"must name a .safetensors file beside it for t. Received: {name!r}.",
            )
            for name in NAMES
        ),
        ({"weight_map": ["x"]}, "must have a weight_map, an object. Received: ['x']."),
        ({}, "must have a weight_map, an object. Received: None."),
        ([], "must hold a JSON object. Received: list."),
    ],
)
def test_an_index_names_files_beside_it_only(tmp_path, content, message):
    """A path would be read wherever it leads, and what is no text is no name."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **dataclasses.asdict(ONE_LAYER)}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(content))
    for read in (starting_weights.stored_head, lambda path: starting_weights.load(path, {}, ONE_LAYER)):
        with pytest.raises(InputError, match=f"{re.escape(str(index))} .*{re.escape(message)}"):
            read(tmp_path)


def test_the_head_of_a_task_goes_before_those_of_pretraining(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **dataclasses.asdict(ONE_LAYER)}))
    pretraining = {"cls.seq_relationship.bias": np.zeros(2, np.float32)}
    for name, head in (("qa_outputs.bias", "question_answering"), ("classifier.bias", "classification")):
        tensors = {**pretraining, name: np.zeros(3, np.float32)}
        save_file(tensors, tmp_path / "model.safetensors")
        assert starting_weights.stored_head(tmp_path) == (head, 3)


def test_a_checkpoint_without_config(tmp_path):
    prefix = write_google(tmp_path, google_tensors(), config=None)
    with pytest.raises(InputError, match=r"must hold bert_config\.json or config\.json"):
        starting_weights.read_config(prefix)
