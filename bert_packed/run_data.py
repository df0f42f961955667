"""What a run's packed records are, found out before the first batch: files, shapes, counts, factor."""

import dataclasses
from pathlib import Path

from bert_packed.run_directory import describe_inputs
from data_gen import records
from data_gen.input_files import find_files
from data_gen.output import read_manifest
from data_gen.schema import PackSpec
from data_gen.settings import InputError


@dataclasses.dataclass(frozen=True)
class PackedData:
    """What is known of a run's records before the first batch.

    Attributes:
        files, eval_files, unpacked_files: Paths; no evaluation, no comparison where these are empty.
        spec, eval_spec, unpacked_spec: Fixed shapes of each; they may differ in K and P. None without files.
        inputs: Dict from flag name to descriptions of its files.
        packing_factor: Mean sequences per training pack, or None without a manifest.
        vocab_size: Of the data's vocabulary, or None where no manifest says.
    """

    files: list[str]
    eval_files: list[str]
    unpacked_files: list[str]
    spec: PackSpec
    eval_spec: PackSpec | None
    unpacked_spec: PackSpec | None
    inputs: dict[str, list[dict]]
    packing_factor: float | None
    vocab_size: int | None

    @property
    def num_packs(self):
        """Packs of all training files together."""
        return sum(entry["num_records"] for entry in self.inputs["input_file"])


def read_data(config):
    """Find a run's records and what they are.

    Args:
        config: `TrainConfig`.

    Raises:
        InputError: no file matches, a file is damaged or unpacked, files disagree, or the packing correction
            has no packing factor to use.
    """
    files, spec = _find_packs(config, "input_file")
    eval_files, eval_spec = _find_packs(config, "eval_input_file")
    unpacked_files, unpacked_spec = _find_packs(config, "unpacked_input_file")
    manifests = read_manifests(files)
    factor = packing_factor(manifests)
    if factor is None and config.packing_correction == "betas":
        raise InputError(
            "`packing_correction` must be none where no manifest.json beside the records tells the packing "
            "factor. Received: betas."
        )
    if unpacked_files:
        _check_comparable(spec, unpacked_spec, factor)
    return PackedData(
        files=files,
        eval_files=eval_files,
        unpacked_files=unpacked_files,
        spec=spec,
        eval_spec=eval_spec,
        unpacked_spec=unpacked_spec,
        inputs={"input_file": describe_inputs(files), "eval_input_file": describe_inputs(eval_files)},
        packing_factor=factor,
        vocab_size=max((m.get("vocab_size") or 0 for m in manifests if m), default=0) or None,
    )


def _find_packs(config, argument):
    """The files that a flag names, and their fixed shapes; nothing where the flag is empty."""
    pattern = getattr(config, argument)
    if not pattern:
        return [], None
    files = find_files(pattern, argument)
    return files, records.read_pack_spec(files)


def _check_comparable(spec, unpacked_spec, factor):
    # Before training, not after it, when the comparison is made
    if unpacked_spec.max_sequences_per_pack != 1 or unpacked_spec.max_seq_length != spec.max_seq_length:
        raise InputError(
            "`unpacked_input_file` must hold packs of one sequence and the length of `input_file`. "
            f"Received: {unpacked_spec}, {spec}."
        )
    if factor is None:
        raise InputError(
            "`unpacked_input_file` needs the packing factor of `input_file`, from a manifest.json beside it. "
            "Received: none."
        )


def read_manifests(files):
    """The manifests beside files: list of dicts, None for a folder without one."""
    return [read_manifest(folder) for folder in sorted({Path(path).parent for path in files})]


def packing_factor(manifests):
    """Mean sequences per pack of packed data sets together, or None where one has no manifest."""
    if not all(manifest and manifest.get("num_packs") for manifest in manifests):
        return None
    return sum(m["num_sequences"] for m in manifests) / sum(m["num_packs"] for m in manifests)
