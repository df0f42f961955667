"""Folders of sentence-transformers: how an encoder's states become a text's vector, read and written."""

import dataclasses
import json
from pathlib import Path

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json

MODULES_FILE, CONFIG_FILE = "modules.json", "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
POOLING_FOLDER = "1_Pooling"
POOLINGS = ("mean", "cls")
# Settings of newer folders and the one value that gives the vectors of `encode`; None for none
USUAL = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "method_output_name": "last_hidden_state",
    **dict.fromkeys(("processing_kwargs", "query_length", "document_length", "query_expansion")),
}


@dataclasses.dataclass(frozen=True)
class VectorSettings:
    """Settings that make a vector of a text's hidden states, and the prompts before that text."""

    pooling: str = "mean"
    normalize: bool = False  # True where vectors have length 1
    prompts: dict[str, str] = dataclasses.field(default_factory=dict)  # by name, as "query"
    max_seq_length: int | None = None  # tokens of a text, [CLS] and [SEP] included
    default_prompt: str = ""  # text before every text, unless another prompt is asked for


def read_settings(folder, lowers_case):
    """The `VectorSettings` of a folder of sentence-transformers, or None for other folders.

    `lowers_case` is whether texts lose their case before the model. Raises `InputError` where the folder has
    another module than transformer, pooling and normalisation, pools in another way than mean or cls, or has
    a setting that would give other vectors than `encode`.
    """
    folder = Path(folder)
    if not (folder / MODULES_FILE).is_file():
        return None
    modules = read_json(folder / MODULES_FILE, list)
    kinds = [_kind(module) for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise InputError(
            f"{folder / MODULES_FILE} must have Transformer, Pooling and at most Normalize. Received: "
            f"{', '.join(kinds) or 'none'}."
        )
    if modules[0].get("path"):  # an older form; the weights beside modules.json are another model's
        rule = "have its Transformer in the folder itself"
        raise InputError(f"{folder / MODULES_FILE} must {rule}. Received: {modules[0]['path']}.")
    pooling = _pooling(folder / str(modules[1].get("path")) / "config.json")
    config = read_json(folder / CONFIG_FILE, default={})
    prompts = {name: text or "" for name, text in (config.get("prompts") or {}).items()}
    default = prompts.get(config.get("default_prompt_name"), "")
    length = _check_reading(folder / LENGTH_FILE, lowers_case)
    if length is not None and (not isinstance(length, int) or length < 1):
        raise InputError(f"{folder / LENGTH_FILE}: max_seq_length must be whole. Received: {length!r}.")
    return VectorSettings(pooling, len(kinds) > 2, prompts, length, default)


def _kind(module):
    """The name of a module's class, and of another's than sentence-transformers' all of its path."""
    found = str(module.get("type")) if isinstance(module, dict) else ""
    return found.rpartition(".")[2] if found.startswith("sentence_transformers.") else found


def _check_reading(path, lowers_case):
    """`max_seq_length` of a file of settings of texts; refuses what would give other vectors."""
    content = read_json(path, default={})
    # False says nothing: case is then the tokenizer's
    if content.get("do_lower_case") and not lowers_case:
        raise InputError(
            f"`do_lower_case` must be true, and the tokens WordPieces, by {path}. Received: texts that keep "
            "their case."
        )
    found = {**content, **((content.get("modality_config") or {}).get("text") or {})}
    for name, usual in USUAL.items():
        if found.get(name) and found[name] != usual:
            raise InputError(f"{path}: {name} must be {usual or 'left out'}. Received: {found[name]}.")
    return content.get("max_seq_length")


def unit(vectors):
    """Vectors `[n, D]` of length 1; a zero vector stays."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _pooling(path):
    content = read_json(path)
    modes = content.get("pooling_mode") or [
        name for name, value in content.items() if name.startswith("pooling_mode_") and value
    ]
    modes = [modes] if isinstance(modes, str) else modes
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    found = [known.get(mode, mode) for mode in modes]
    if found not in [[name] for name in POOLINGS]:
        raise InputError(f"{path} must pool by mean or cls. Received: {' and '.join(found) or 'nothing'}.")
    if not content.get("include_prompt", True):
        raise InputError(f"{path} must have include_prompt, as all tokens are pooled. Received: false.")
    return found[0]


def write_settings(folder, settings, width):
    """Write the files of `VectorSettings` beside an exported encoder with vectors of a width."""
    folder = Path(folder)
    kinds = ["Transformer", "Pooling"] + ["Normalize"] * settings.normalize
    paths = ["", POOLING_FOLDER, "2_Normalize"]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    pooling = {
        "word_embedding_dimension": width,
        "pooling_mode_cls_token": settings.pooling == "cls",
        "pooling_mode_mean_tokens": settings.pooling == "mean",
        "include_prompt": True,
    }
    config = {
        "prompts": settings.prompts,
        "default_prompt_name": None,
        "similarity_fn_name": "cosine" if settings.normalize else "dot",
    }
    length = {"max_seq_length": settings.max_seq_length, "do_lower_case": False}
    (folder / POOLING_FOLDER).mkdir()
    contents = {MODULES_FILE: modules, f"{POOLING_FOLDER}/config.json": pooling, CONFIG_FILE: config}
    for name, content in {**contents, LENGTH_FILE: length}.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if settings.normalize:
        (folder / paths[2]).mkdir()
