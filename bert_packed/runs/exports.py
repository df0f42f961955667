"""Exports of a run while it trains, and the model cards of all exports.

A card has code that loads the model, scores, data, packing, recipe and audit, by the files of the run.
"""

import dataclasses
import re
from pathlib import Path

from bert_packed.architectures import registry
from bert_packed.checkpoints import checkpoint
from bert_packed.checkpoints.export_formats import write_hugging_face
from bert_packed.core.hub import DATA_SET
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json, write_folder
from bert_packed.records.inputs import folder_of
from bert_packed.records.provenance import read_manifest, resolve_path
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.runs.run_directory import RUN_FILE, read_run
from bert_packed.runs.vocabulary import find_copy, trained_length
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.metrics_log import EVAL_FILE, read_rows

CARD_FILE = "README.md"
# The hub's name of the task of each head
TASKS = {
    registry.PRETRAINING: "fill-mask",
    registry.MASKED_LM: "fill-mask",
    registry.QUESTION_ANSWERING: "question-answering",
    registry.CLASSIFICATION: "text-classification",
    registry.TOKEN_CLASSIFICATION: "token-classification",
    CAUSAL_LM: "text-generation",
}


def export_step(folder, step, model, weights, config, data):
    """Write `export-STEP`, whole or not at all, in place of an earlier export of the step; return its path.

    Raises `NotFiniteError` where a weight is NaN or infinite.
    """
    with write_folder(folder / f"export-{step}") as partial:
        write_hugging_face(
            partial,
            model,
            weights,
            vocab_file=config.export_vocab_file or find_copy(folder),
            max_length=trained_length(read_run(folder)),
            do_lower_case=data.train.do_lower_case is not False,
        )
        write_model_card(partial, model, _read_record(folder, step), step)
    return folder / f"export-{step}"


def read_origin(path):
    """The dict of `run.json` and the step of a checkpoint or of a run's newest; (None, None) without a run.

    The dict has `scores` too, the last row of the run's evaluations up to that step, {} without any.

    Raises:
        InputError: `run.json` is damaged.
    """
    folder = Path(path)
    if not checkpoint.NAME.fullmatch(folder.name):
        folder = next(reversed(checkpoint.list_checkpoints(folder)), None)
    if folder is None or not (folder.parent / RUN_FILE).is_file():
        return None, None
    step = int(checkpoint.NAME.fullmatch(folder.name)[1])
    return _read_record(folder.parent, step), step


def _read_record(folder, step):
    rows = [row for row in read_rows(folder / EVAL_FILE) if int(row["step"]) <= step]
    scores = {name: float(value) for row in rows[-1:] for name, value in row.items() if value}
    return read_run(folder) | {"scores": scores}


def read_audit(path):
    """The rows that `bert-packed audit --json=FILE` wrote: list of dicts; raises `InputError`."""
    rows = read_json(path, object)
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"name", "result"} <= row.keys() for row in rows
    ):
        raise InputError(f"`audit_file` must be what `audit --json` wrote. Received: {path}.")
    return rows


def write_model_card(folder, model, run=None, step=None, audit=None, languages=""):
    """Write `README.md`, whose front matter the hub reads, to the folder of an export.

    `run`, or some of its entries, and `step` are of `read_origin`, `audit` of `read_audit`; None where they
    are not known. `languages` are codes, separated by commas. All other files of the folder must be there.
    """
    run = run or {}
    family = registry.family_of(model.config)
    name = family.load_names().classes[model.head]
    front = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {TASKS[model.head]}",
        "tags:",
        f"- {family.name.lower()}",
        "- sequence-packing",
    ]
    manifests = _manifests(run)
    texts = [text for origin, manifest in manifests for text in _texts(origin, manifest)]
    front += [*origins(run.get("flags", {}).get("init_checkpoint", ""), texts, languages), "---"]
    sections = {
        "Held-out scores": [f"- {score}: {value:.6g}" for score, value in (run.get("scores") or {}).items()],
        "Data": _data(manifests),
        "Packing": _packing(manifests),
        "Recipe": [] if step is None else _recipe(run, step),
        "Audit": _audit(audit),
        "Not known": ["License, intended use and limits, and languages unless the head has them: add them."],
    }
    lines = [*front, "", f"# A packed {family.name}", "", *_code(folder, name), ""]
    if registry.ablations(model.config):
        lines += [f"**Packing was broken on purpose: {', '.join(registry.ablations(model.config))}.**", ""]
    for title, content in sections.items():
        lines += [f"## {title}", "", *(content or ["Not known."]), ""]
    (Path(folder) / CARD_FILE).write_text("\n".join(lines), encoding="utf-8")


def origins(start, texts, languages=""):
    """Lines of a card's front matter: what of a model's origins has a name on the hub.

    `start` is the recorded `init_checkpoint`, `texts` begin with paths of data.
    """
    base = re.fullmatch("([^@]+)@[0-9a-f]{40}", start)
    sets = {found["repo"] for text in texts if (found := DATA_SET.match(text))}
    known = {"language": languages, "base_model": base and base[1], "datasets": ", ".join(sorted(sets))}
    return [f"{title}: [{value}]" for title, value in known.items() if value]


def _code(folder, name):
    """Lines of code that load the model of a folder, with its tokenizer if it has one."""
    opened = {"tokenizer": "AutoTokenizer"} if (Path(folder) / "tokenizer_config.json").exists() else {}
    opened["model"] = name
    lines = [f'{what} = {one}.from_pretrained("FOLDER_OR_NAME")' for what, one in opened.items()]
    return ["```python", f"from transformers import {', '.join(opened.values())}", *lines, "```"]


def _data(manifests):
    lines = []
    for folder, manifest in manifests:
        sequences = f"{manifest['num_sequences']:,} sequences"
        vocabulary = manifest.get("vocab_sha256")
        lines.append(f"- {sequences}; files of records: {len(manifest['inputs'])}")
        if vocabulary:
            cases = {True: ", without case and accents", False: ", cased", None: ""}
            case = cases[manifest.get("do_lower_case")]
            lines.append(f"- vocabulary of {manifest['vocab_size']:,}{case}, SHA-256 `{vocabulary}`")
        texts = _texts(folder, manifest)
        lines += [f"- text: {text}" for text in texts] or ["- text: not known"]
    return lines


def _texts(folder, manifest):
    """The texts that the records of packs were made of, as the manifest beside those says."""
    texts = {}
    for entry in manifest["inputs"]:
        path = resolve_path(entry, folder)
        made = read_manifest(folder_of(path), any_json=True) or {}
        if made.get("kind") != "unpacked":
            continue
        listed = [file["sha256"] for split in made["splits"].values() for file in split["files"]]
        # Content decides, since the folder may have been made again from other texts
        if entry["sha256"] in listed:
            for text in made["inputs"]:
                texts[text["sha256"]] = f"{text['path']}, SHA-256 `{text['sha256']}`" + (
                    f", {text['num_documents']:,} documents" if "num_documents" in text else ""
                )
    return texts.values()


def _packing(manifests):
    rows = []
    for _, manifest in manifests:
        spec, efficiency = manifest["spec"], f"{100 * manifest['efficiency']:.2f} %"
        rows.append(
            f"| {manifest['num_packs']:,} | {spec['max_seq_length']} | {spec['max_sequences_per_pack']} | "
            f"{manifest['packing_factor']:.3f} | {efficiency} |"
        )
    head = "| packs | tokens each | most sequences in one | packing factor | tokens that are no padding |"
    return [head, "|---|---|---|---|---|", *rows] if rows else []


def _recipe(run, step):
    flags = run["flags"]
    steps, packs = flags.get("num_train_steps"), flags.get("train_batch_size")
    lines = [f"{step:,} optimizer steps" + (f" of {steps:,}." if steps else ".")]
    factor = run["data"].get("packing_factor")
    if factor and packs:
        lines.append(f"A step is {packs} packs, {factor * packs:.1f} sequences on average.")
    backends = list(dict.fromkeys(segment["backend"] for segment in run["segments"]))
    if backends:
        lines.append(f"Trained under {', then '.join(backends)}.")
    lines += ["", "```"]
    fields = dataclasses.fields(PretrainingConfig)
    # Flags that may change while a run continues, so no result depends on them
    changeable = {field.name for field in fields if field.metadata["changeable"]}
    defaults = {field.name: field.default for field in fields} if "objective" in flags else {}
    lines += [
        f"--{name}={value}"
        for name, value in flags.items()
        if name not in changeable and value != defaults.get(name, "")
    ]
    return [*lines, "```"]


def _audit(audit):
    if audit is None:
        return ["Not known: `bert-packed audit` proves that no sequence saw another."]
    failed = [row["name"] for row in audit if row["result"] != "pass"]
    summary = f"{len(audit) - len(failed)} of {len(audit)} checks passed."
    columns = list(audit[0]) if audit else []
    table = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    table += [f"| {' | '.join(str(row[column]) for column in columns)} |" for row in audit]
    return [summary + (f" Failed: {', '.join(failed)}." if failed else ""), "", *table]


def _manifests(run):
    """Folders and manifests of the packs that a run read, where they are still of them."""
    entries = run.get("inputs", {}).get("input_file", [])
    found = []
    for folder in sorted({folder_of(entry["path"]) for entry in entries}):
        manifest = read_manifest(folder, any_json=True) or {}
        listed = {file["sha256"] for file in manifest.get("files", [])}
        own = {entry["sha256"] for entry in entries if folder_of(entry["path"]) == folder}
        # The manifest of other files, written to the same folder later, would describe another run's data
        if manifest.get("kind") == "packed" and "plan" in manifest and own <= listed:
            found.append((folder, manifest))
    return found
