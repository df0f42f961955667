"""The same sequences packed and unpacked, and held-out ones: what a comparison of both may be made of."""

import collections

from bert_packed.config import load_model_config
from bert_packed.core.settings import InputError
from bert_packed.records.first_records import read_pack_spec
from bert_packed.records.inputs import find_files, folder_of
from bert_packed.records.manifests import read_manifest


def read_packing_factor(tell, **files):
    """Of the packed data of a pair, by their manifests; float.

    Args:
        tell: Called with a line where packs and rows are of different lengths, which may be, but costs time.
        **files: Two flags with their patterns: the packed data, then the same sequences at depth 1.

    Raises:
        InputError: the unpacked data are not the same sequences at depth 1, or no manifest tells.
    """
    found = {name: read_packs(name, pattern) for name, pattern in files.items()}
    for name, packs in found.items():
        if packs.packing_factor is None:
            raise InputError(f"`{name}` must have manifest.json beside it. Received: {files[name]}, without.")
    (packed_name, packed), (unpacked_name, unpacked) = found.items()
    depth = unpacked.spec.max_sequences_per_pack
    in_packs, in_rows = _count_lengths(packed), _count_lengths(unpacked)
    num_packed, num_unpacked = in_packs.total(), in_rows.total()
    rule = f"`{unpacked_name}` must hold the {num_packed:,} sequences of {packed_name} at depth 1"
    if depth != 1 or num_packed != num_unpacked:
        raise InputError(f"{rule}. Received: {num_unpacked:,} at depth {depth}.")
    differing = [length for length in in_packs | in_rows if in_packs[length] != in_rows[length]]
    if differing:
        length = min(differing)
        raise InputError(
            f"{rule}. Received: {in_rows[length]:,} sequences of {length} tokens, where {packed_name} has "
            f"{in_packs[length]:,}."
        )
    if packed.spec.max_seq_length != unpacked.spec.max_seq_length:
        tell(
            f"{packed_name} has packs of {packed.spec.max_seq_length} tokens, {unpacked_name} rows of "
            f"{unpacked.spec.max_seq_length}: hours do not compare equal shapes"
        )
    return packed.packing_factor


def check_data(settings, **files):
    """Check that records fit a pre-training, by what their first records and manifests say.

    Args:
        settings: `TrainConfig` with the objective and the model.
        **files: Flags with their patterns.

    Returns:
        Checksums of the vocabularies that the manifests tell: sorted list, of one at most.

    Raises:
        InputError: a pattern matches nothing, records are for another objective, a sequence or the vocabulary
            is larger than the model's tables, or vocabularies differ.
    """
    from bert_packed.runs.objectives import check_records

    found = {name: read_packs(name, pattern) for name, pattern in files.items()}
    vocabularies = {}
    for name, packs in found.items():
        check_records(settings, name, packs)
        model = load_model_config(settings.bert_config_file, packs.vocab_size)
        for what, limit_name, value in (
            ("vocabulary", "vocab_size", packs.vocab_size or 0),
            ("longest sequence", "max_position_embeddings", packs.longest),
        ):
            limit = getattr(model, limit_name, value)
            if value > limit:
                raise InputError(
                    f"the {what} of `{name}` must be at most {limit_name}={limit} of "
                    f"{settings.bert_config_file}. Received: {value}."
                )
        vocabularies |= dict.fromkeys(packs.vocabularies, name)
    if len(vocabularies) > 1:
        parts = ", ".join(f"{checksum[:12]} of {name}" for checksum, name in vocabularies.items())
        raise InputError(f"all records must be of one vocabulary. Received vocab_sha256: {parts}.")
    return sorted(vocabularies)


def read_packs(name, pattern):
    """The packed records that a flag names, without a pass over them: `PackedFiles`; raises `InputError`."""
    from bert_packed.runs.pretraining_data import PackedFiles  # TensorFlow: not for --help

    files = find_files(pattern, name)
    spec = read_pack_spec(files, name, pattern)
    folders = sorted({folder_of(path) for path in files})
    manifests = [read_manifest(folder) or {} for folder in folders]
    packed = [manifest for manifest in manifests if manifest.get("kind") == "packed"]
    return PackedFiles(files, spec, packed, len(packed) == len(folders))


def _count_lengths(packs):
    """Sequences of each length: Counter."""
    counts = collections.Counter()
    for manifest in packs.manifests:
        histogram = manifest["histogram"]
        counts.update(dict(zip(histogram["lengths"], histogram["counts"], strict=True)))
    return counts
