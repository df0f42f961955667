"""The vocabulary of a run: given, beside its checkpoint, or that of its packed records."""

import dataclasses
import hashlib
import json
from pathlib import Path

from bert_packed.architectures.registry import family_of, load_model_config
from bert_packed.checkpoints import checkpoint
from bert_packed.checkpoints.export_formats import check_vocabulary
from bert_packed.checkpoints.sentence_transformers import read_settings
from bert_packed.core.hub import in_cache
from bert_packed.core.settings import InputError
from bert_packed.core.storage import file_sha256, is_file, open_file, read_json, write_json, write_whole
from bert_packed.data.dynamic_masking import DynamicMasking
from bert_packed.records.inputs import folder_of
from bert_packed.runs import run_directory
from bert_packed.text import byte_bpe
from bert_packed.text.masking import masking_rules
from bert_packed.text.tokenization import load_vocab
from bert_packed.text.vocabularies import TOKENIZER_JSON, count_tokens, file_name, load_maskable
from bert_packed.text.vocabularies import WORDPIECES as VOCAB_FILE

TOKENIZER_CONFIG = "tokenizer_config.json"  # of Hugging Face
NAMES = (VOCAB_FILE, TOKENIZER_JSON)
MOST_PADDING = 127  # rows that round a vocabulary up to a multiple of 128, as accelerators like it


@dataclasses.dataclass(frozen=True)
class RecordsVocabulary:
    """The vocabulary of a run's packs, which the run keeps a copy of."""

    path: str
    content: bytes  # read at once: the file may lie in a directory that a new run empties
    size: int  # number of tokens
    do_lower_case: bool | None  # None where unknown, and for a tokenizer.json, which has its own rule

    @property
    def facts(self):
        """Its entry in `run.json`: dict."""
        checksum = hashlib.sha256(self.content).hexdigest()
        return {"file": file_name(self.path), "sha256": checksum, "do_lower_case": self.do_lower_case}


def names_for(model_config):
    """The names, of `NAMES`, that the vocabulary of a model's family may have: list."""
    able = family_of(model_config).load_names().vocabularies
    return [name for name in NAMES if name in able]


def find_vocab(init_checkpoint, vocab_file, model_config):
    """The vocabulary that is given, else the one of a checkpoint, of a form for its model: `Path`.

    If a folder holds two vocabularies, the one of the model's size wins. Raises `InputError` where there is
    none.
    """
    if vocab_file:
        return Path(vocab_file)
    names = names_for(model_config)
    if found := _vocab_beside(init_checkpoint, names):
        return _of_model_size(
            [path for name in names if (path := found.with_name(name)).is_file()], model_config
        )
    raise InputError(
        f"`vocab_file` must be given where no {' or '.join(names)} is beside `init_checkpoint`. Received: "
        f"nothing, and init_checkpoint={str(init_checkpoint)!r}."
    )


def _of_model_size(paths, model_config):
    """The first of some vocabularies of one size, else the one that fits a model best."""
    if len(paths) == 1:
        return paths[0]
    sizes = {path: count_tokens(path, "init_checkpoint") for path in paths}
    if len({*sizes.values()}) == 1:
        return paths[0]
    near = {path: size for path, size in sizes.items() if 0 <= model_config.vocab_size - size <= MOST_PADDING}
    if near:
        return max(near, key=near.get)
    found = " and ".join(f"{path}, of {size}" for path, size in sizes.items())
    raise InputError(
        f"`init_checkpoint` must have a vocabulary of its vocab_size={model_config.vocab_size} where no "
        f"`vocab_file` is given. Received: {found}."
    )


def _vocab_beside(init_checkpoint, names):
    """The file of a checkpoint that has one of the names, the first before others: `Path`, or None."""
    start = Path(init_checkpoint)
    folders = [start] if init_checkpoint else []
    # A run writes vocab.txt beside its checkpoints, and Google beside a prefix. Beside another whole model
    # lies another model's
    if folders and (checkpoint.NAME.fullmatch(start.name) or Path(f"{start}.index").is_file()):
        folders.append(start.parent)
    paths = [folder / name for folder in folders for name in names]
    return next((path for path in paths if path.is_file()), None)


def check_start(init_checkpoint, model_config, records):
    """Refuse weights that learned other tokens than the records have, where both are known.

    `records` is a `RecordsVocabulary` or None. Raises `InputError`.
    """
    if not records:
        return
    # A BERT of Hugging Face may have its WordPieces in a tokenizer.json too, or in that alone
    name = file_name(records.path)
    path = _vocab_beside(init_checkpoint, [name]) or _vocab_beside(init_checkpoint, names_for(model_config))
    if path and (path.name != name or not _have_equal_tokens(path, records.path, records.content)):
        raise InputError(
            f"`init_checkpoint` must have the vocabulary of the records of `input_file`, {records.path}. "
            f"Received: {path}, another one."
        )


def _have_equal_tokens(path, other_path, other_content):
    """True if a checkpoint's vocabulary has the tokens of another of the same kind."""
    if path.name == VOCAB_FILE:
        # Tokens hold no ASCII white space: line ends may differ
        return path.read_bytes().split() == other_content.split()
    theirs = byte_bpe.load(path, "init_checkpoint").tokenizer
    return _ids_of_texts(theirs) == _ids_of_texts(byte_bpe.load(other_path).tokenizer)


def _ids_of_texts(tokenizer):
    """The parts that decide the ids of texts; programs may write the rest of an equal tokenizer otherwise."""
    content = json.loads(tokenizer.to_str())
    parts = content["model"].get("merges"), content["normalizer"], content["pre_tokenizer"]
    return tokenizer.get_vocab(), *parts


def describe_vocabulary(path, size, model_config, has_checkpoint):
    """A line about the vocabulary, of `size` tokens.

    Raises `InputError` where the model's embeddings, with `has_checkpoint`, were learned for a larger one.
    Rows that round a vocabulary up to a multiple of 8 are allowed.
    """
    line = f"vocabulary {path}, {size:,} {'WordPieces' if file_name(path) == VOCAB_FILE else 'tokens'}"
    num_more = model_config.vocab_size - size
    if not num_more:
        return line
    # A few rows more may be padding for accelerators; many are tokens of another vocabulary
    if has_checkpoint and (num_more > MOST_PADDING or model_config.vocab_size % 8):
        raise InputError(
            f"`vocab_file` must be the one that `init_checkpoint` was trained with, of its "
            f"vocab_size={model_config.vocab_size}. Received: {path}, of {size}."
        )
    return f"{line}; the model has {num_more:,} more rows, which no text uses"


def check_as_trained(config, vocab_path):
    """Check that texts are read as in the run that trained a model.

    Raises `InputError` where the vocabulary, or `do_lower_case` of WordPieces, differs from that run's
    `run.json`; or from the case and the tokens, of a file of the same kind, in a folder of Hugging Face.
    """
    if not config.init_checkpoint:
        return
    folder = run_folder(config.init_checkpoint)
    run = run_directory.read_run(folder) if folder else None
    path = folder / run_directory.RUN_FILE if folder else Path(config.init_checkpoint) / TOKENIZER_CONFIG
    case = trained_case(run) if folder else known_case(config.init_checkpoint)
    # A tokenizer.json has its own rule
    if file_name(vocab_path) == VOCAB_FILE and case not in (None, config.do_lower_case):
        raise InputError(
            f"`do_lower_case` must be as in the training of `init_checkpoint`, {case} by {path}. "
            f"Received: {config.do_lower_case}."
        )
    if not folder:
        beside = _vocab_beside(config.init_checkpoint, [file_name(vocab_path)])
        if beside and not _have_equal_tokens(beside, vocab_path, Path(vocab_path).read_bytes()):
            raise InputError(
                f"`vocab_file` must have the tokens of {beside}. Received: {vocab_path}, with others."
            )
        return
    known = {(run.get("vocabulary") or {}).get("sha256"), run["data"].get("vocab_sha256")} - {None}
    if known and file_sha256(vocab_path) not in known:
        raise InputError(
            f"`vocab_file` must be the one that `init_checkpoint` was trained with, by {path}. "
            f"Received: {vocab_path}, another one."
        )


def trained_case(run):
    """The `do_lower_case` of a run, by the content of its `run.json`; None where it is not known."""
    # Fine-tuning has it among its flags, pre-training where its records say so
    return run["flags"].get("do_lower_case", (run.get("vocabulary") or {}).get("do_lower_case"))


def known_case(init_checkpoint):
    """The `do_lower_case` of a checkpoint, by its run or Hugging Face's settings beside it; else None."""
    case = _known(init_checkpoint, trained_case, "do_lower_case")
    return None if case is None else bool(case)


def known_length(init_checkpoint):
    """Most tokens of a text for a checkpoint, by its run or the tokenizer's settings beside it; else None."""
    length = _known(init_checkpoint, trained_length, "model_max_length")  # 1e30 for no limit
    return length if isinstance(length, int) and length > 0 else None


def _known(init_checkpoint, of_run, name):
    folder = run_folder(init_checkpoint)
    value = of_run(run_directory.read_run(folder)) if folder else None
    if value is not None:
        return value
    return read_json(Path(init_checkpoint) / TOKENIZER_CONFIG, default={}).get(name)


def trained_length(run):
    """The longest sequence that the model of a run has seen, its start included; None where not known.

    A BERT's positions behind it have never learned. `run` is the dict of `read_run`, or None.
    """
    if not run:
        return None
    longest, start = run.get("data", {}).get("longest_sequence"), run["flags"].get("init_checkpoint")
    if not longest or not start:
        return longest or None
    before = known_length(in_cache(start))  # where it is a name
    return max(longest, before) if before else None


def run_folder(init_checkpoint):
    """The output directory of the run that a checkpoint is of, or None: `Path`."""
    start = Path(init_checkpoint)
    folder = start.parent if checkpoint.NAME.fullmatch(start.name) else start
    return folder if (folder / run_directory.RUN_FILE).is_file() else None


def find_vector_settings(init_checkpoint, lowers_case):
    """`read_settings` of a folder of sentence-transformers, or of the export of a run that trains vectors."""
    folder = run_folder(init_checkpoint)
    places = [init_checkpoint, *([folder / "model"] if folder else [])]
    return next(filter(None, (read_settings(place, lowers_case) for place in places)), None)


def find_copy(folder):
    """The vocabulary that a run keeps in its output directory, as text; "" for none."""
    found = [folder / name for name in NAMES if (folder / name).is_file()]
    return str(found[0]) if found else ""


def keep_copy(folder, vocabulary):
    """Copy a `RecordsVocabulary`, or None, into the output directory of a run that has none yet."""
    if not vocabulary or find_copy(folder):
        return
    with write_whole(str(folder / file_name(vocabulary.path))) as partial, open_file(partial, "wb") as file:
        file.write(vocabulary.content)
    path = folder / run_directory.RUN_FILE
    write_json(path, {**run_directory.read_run(folder), "vocabulary": vocabulary.facts})


def check_export(config, model_config, data):
    """Check the tokenizer that a run is to export, before the run starts.

    Raises `InputError` where the vocabulary is no such file, has more tokens than the model, or is not the
    records'; `OSError` where it cannot be read.
    """
    path = config.export_vocab_file
    if not path:
        return
    check_vocabulary(path, model_config, "export_vocab_file")
    known = data.train.vocabularies or ([data.vocabulary.facts["sha256"]] if data.vocabulary else [])
    # There is nothing to compare with without manifests and `vocab_file`
    if known and file_sha256(path) not in known:
        raise InputError(
            "`export_vocab_file` must be the vocabulary of `input_file`, by the manifest.json beside that or "
            f"by `vocab_file`. Received: {path}, another one."
        )


def with_run_vocabulary(config):
    """An `ExportConfig` whose `vocab_file`, where it is empty, is that of the run of its checkpoint.

    Raises `InputError` where `vocab_file` or `do_lower_case` differs from that run's.
    """
    folder = run_folder(config.init_checkpoint)
    if config.format != "hf" or not folder:
        return config
    config = dataclasses.replace(config, vocab_file=config.vocab_file or find_copy(folder))
    if config.vocab_file:
        check_as_trained(config, config.vocab_file)
    return config


def find_records_vocabulary(config, train):
    """The vocabulary of the packs of a run: `RecordsVocabulary`, or None where none is known to be theirs.

    It is `vocab_file`; or the file with a checksum that their manifests have, beside the records, beside what
    they were packed from, in the run that continues or in that of `init_checkpoint`. `masking=dynamic` needs
    one, and takes what lies there where no manifest has a checksum.

    Raises:
        InputError: the vocabulary is not found, no vocabulary, or another one than the records'.
    """
    is_needed = config.masking == "dynamic"
    path = config.vocab_file
    if not path and (train.vocabularies or is_needed):
        path = _find_file(config, train, is_needed)
    if not path:
        return None
    with open_file(path) as file:
        content = file.read()
    is_wordpieces = file_name(path) == VOCAB_FILE
    found = RecordsVocabulary(
        path,
        content,
        len(load_vocab(path)) if is_wordpieces else byte_bpe.load(path).vocab_size,
        train.do_lower_case if is_wordpieces else None,
    )
    checksum = found.facts["sha256"]
    # Ids of the records would mean other WordPieces, and random replacements would be none of theirs
    if train.vocabularies and checksum not in train.vocabularies:
        raise InputError(
            f"`vocab_file` must be the one that the records of `input_file` were made with, of SHA-256 "
            f"{train.vocabularies[0][:12]}... by their manifest.json. Received: {path}, of {checksum[:12]}..."
        )
    return found


def make_masking(config, vocabulary):
    """The dynamic masking of a run's packs, by the vocabulary of its records; None for their own masks."""
    if config.masking == "static":
        return None
    return DynamicMasking(load_maskable(vocabulary.path), masking_rules(config), config.random_seed)


def _find_file(config, train, is_needed):
    """The file of the vocabulary of packs, "" where it is neither found nor needed."""
    # A checksum says which file is meant; without one, files that the model cannot read are others'
    names = NAMES if train.vocabularies else names_for(load_model_config(config.bert_config_file))
    folders = list(dict.fromkeys([*map(folder_of, train.files), *train.input_folders]))
    runs = [config.init_checkpoint and run_folder(config.init_checkpoint)]
    if not config.overwrite and checkpoint.list_checkpoints(Path(config.output_dir)):
        runs.append(config.output_dir)  # another run's, where a new one starts
    for folder in [*folders, *filter(None, runs)]:
        for name in names:
            path = f"{folder}/{name}"
            # One of another checksum may lie there by chance
            if is_file(path) and (not train.vocabularies or file_sha256(path) in train.vocabularies):
                return path
    if not is_needed:
        return ""
    raise InputError(
        f"`vocab_file` must be given with masking=dynamic where no {' or '.join(names)} is beside the "
        f"records of `input_file` or what they were packed from. Received: nothing, and {', '.join(folders)}."
    )
