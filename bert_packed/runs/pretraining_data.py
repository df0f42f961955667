"""What a run's packed records are, found out before the first batch: files, shapes, counts, factor."""

import dataclasses
import functools

from bert_packed.data.input_pipeline import checked, eval_batches
from bert_packed.data.read_order import index_files
from bert_packed.runs.run_directory import describe_inputs
from data_gen.cli.settings import InputError
from data_gen.jobs.output import read_manifest
from data_gen.records import tfrecords
from data_gen.records.frames import scan_file
from data_gen.records.inputs import find_files, folder_of
from data_gen.schema import PackSpec


@dataclasses.dataclass(frozen=True)
class PackedFiles:
    """The records that one flag names.

    Attributes:
        files: Paths; none where the flag is empty.
        spec: Their fixed shapes, or None without files.
        manifests: Manifests beside them, of those folders that have one of packed records.
        has_all_manifests: Whether every folder has one.
    """

    files: list[str]
    spec: PackSpec | None
    manifests: list[dict]
    has_all_manifests: bool

    @functools.cached_property
    def scans(self):
        """What one reading of each file tells: list of `frames.FileScan`; read at first use."""
        return [scan_file(path) for path in self.files]

    @property
    def index(self):
        """Where the packs are: `PackIndex`."""
        return index_files(self.files, self.scans)

    @property
    def packing_factor(self):
        """Mean sequences per pack, or None where a folder has no manifest."""
        if not self.files or not self.has_all_manifests:
            return None
        num_packs = sum(manifest["num_packs"] for manifest in self.manifests)
        return sum(manifest["num_sequences"] for manifest in self.manifests) / num_packs

    @property
    def vocabularies(self):
        """Checksums of the vocabularies that the manifests tell: sorted list."""
        return sorted({m["vocab_sha256"] for m in self.manifests if m.get("vocab_sha256")})

    @property
    def vocab_size(self):
        """Of the vocabulary, or None where no manifest tells."""
        return max((manifest.get("vocab_size") or 0 for manifest in self.manifests), default=0) or None

    @property
    def longest(self):
        """Longest sequence that the manifests tell, or 0."""
        return max(
            (max(manifest["histogram"]["lengths"], default=0) for manifest in self.manifests), default=0
        )


@dataclasses.dataclass(frozen=True)
class PackedData:
    """All records of a run.

    Attributes:
        train, eval, unpacked: `PackedFiles` of the three flags; K and P may differ between them.
        inputs: Dict from flag name to descriptions of its files, of those that the result depends on.
    """

    train: PackedFiles
    eval: PackedFiles
    unpacked: PackedFiles
    inputs: dict[str, list[dict]]

    @property
    def num_packs(self):
        """Training packs."""
        return sum(entry["num_records"] for entry in self.inputs["input_file"])

    @property
    def facts(self):
        """What a result depends on besides the records: dict for `run.json`."""
        return {"packing_factor": self.train.packing_factor, "vocabularies": self.train.vocabularies}


def read_data(config):
    """Find a run's records and what they are.

    Args:
        config: `TrainConfig`.

    Returns:
        `PackedData`.

    Raises:
        InputError: no file matches, a file is damaged or unpacked, files disagree in shape or vocabulary, or
            the packing factor is needed and no manifest tells it.
    """
    names = ("input_file", "eval_input_file", "unpacked_input_file")
    train, held_out, unpacked = (_find_packs(config, name) for name in names)
    if train.packing_factor is None and config.packing_correction == "betas":
        raise InputError(
            "`packing_correction` must be none where no manifest.json beside the records tells the packing "
            "factor. Received: betas."
        )
    _check_vocabularies({name: found for name, found in zip(names, (train, held_out, unpacked), strict=True)})
    if unpacked.files:
        _check_comparable(train, unpacked)
    inputs = {
        "input_file": describe_inputs(train.files, train.scans),
        "eval_input_file": describe_inputs(held_out.files, held_out.scans),
    }
    return PackedData(train, held_out, unpacked, inputs)


def read_shapes(config):
    """What compiling a run must know of its training records, without a pass over them.

    Args:
        config: `TrainConfig`.

    Returns:
        `PackedData` with the shapes and manifests of `input_file`; no held-out records, no `inputs`.

    Raises:
        InputError: no file matches, a file is unpacked, or files disagree in shape.
    """
    nothing = PackedFiles([], None, [], False)
    return PackedData(_find_packs(config, "input_file"), nothing, nothing, {})


def check_fits(data, model_config, config, features):
    """Check, before training, that the records fit the model: by the manifests, and all held-out records.

    Held-out records are all read, because a mistake in them would show after training only.

    Args:
        data, model_config, config: Of the run.
        features: Those of its objective.

    Raises:
        InputError: a vocabulary or a sequence is larger than the model's tables, or a held-out record is
            damaged or has an id without a row.
    """
    for name, found in (("input_file", data.train), ("eval_input_file", data.eval)):
        for what, limit_name, value in (
            ("vocabulary", "vocab_size", found.vocab_size or 0),
            ("longest sequence", "max_position_embeddings", found.longest),
        ):
            limit = getattr(model_config, limit_name)
            if value > limit:
                raise InputError(
                    f"the {what} of `{name}` must be at most {limit_name}={limit} of "
                    f"{config.bert_config_file}. Received: {value}."
                )
    if data.eval.files:
        dataset = eval_batches(data.eval.files, data.eval.spec, config.eval_batch_size, features)
        for _ in checked(dataset, data.eval.files, data.eval.spec, model_config, features):
            continue


def _find_packs(config, name):
    """The records that a flag names."""
    pattern = getattr(config, name)
    if not pattern:
        return PackedFiles([], None, [], False)
    files = find_files(pattern, name)
    spec = tfrecords.read_pack_spec(files, name, pattern)
    folders = sorted({folder_of(path) for path in files})
    manifests = [manifest for folder in folders if (manifest := _packed_manifest(folder))]
    return PackedFiles(files, spec, manifests, len(manifests) == len(folders))


def _packed_manifest(folder):
    """The manifest of a folder if it is one of packed records, else None."""
    manifest = read_manifest(folder)
    return manifest if manifest and manifest.get("kind") == "packed" else None


def _check_vocabularies(found):
    known = {name: packs.vocabularies for name, packs in found.items() if packs.vocabularies}
    if len({checksum for checksums in known.values() for checksum in checksums}) > 1:
        parts = "; ".join(
            f"{name}: {', '.join(c[:12] for c in checksums)}" for name, checksums in known.items()
        )
        raise InputError(f"all records must be of one vocabulary. Received vocab_sha256 of {parts}.")


def _check_comparable(train, unpacked):
    # Before training, not after it, when the comparison is made
    if unpacked.spec.max_sequences_per_pack != 1 or unpacked.spec.max_seq_length != train.spec.max_seq_length:
        raise InputError(
            "`unpacked_input_file` must hold packs of one sequence and the length of `input_file`. "
            f"Received: {unpacked.spec}, {train.spec}."
        )
    if train.packing_factor is None:
        raise InputError(
            "`unpacked_input_file` needs the packing factor of `input_file`, from a manifest.json beside it. "
            "Received: none."
        )
    if sum(m["num_sequences"] for m in unpacked.manifests) not in (
        0,
        sum(m["num_sequences"] for m in train.manifests),
    ):
        raise InputError(
            "`unpacked_input_file` must hold the sequences of `input_file`. Received manifests with other "
            "numbers of sequences."
        )
