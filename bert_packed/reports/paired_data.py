"""The same sequences packed and unpacked: what a comparison of both may train on."""

from data_gen.cli.settings import InputError


def read_packing_factor(output_dir, **files):
    """Of the packed data of a pair, by their manifests; float.

    Args:
        output_dir: Of the comparison; nothing is written.
        **files: Two flags with their patterns: the packed data, then the same sequences at depth 1.

    Raises:
        InputError: the unpacked data are not the same sequences at depth 1, or no manifest tells.
    """
    # TensorFlow: not for --help
    from bert_packed.runs.pretraining_config import TrainConfig
    from bert_packed.runs.pretraining_data import read_shapes

    found = {}
    for name, pattern in files.items():
        found[name] = read_shapes(TrainConfig(input_file=pattern, output_dir=output_dir)).train
        if found[name].packing_factor is None:
            raise InputError(f"`{name}` must have manifest.json beside it. Received: {pattern}, without.")
    packed, unpacked = files
    depth = found[unpacked].spec.max_sequences_per_pack
    counts = [sum(manifest["num_sequences"] for manifest in packs.manifests) for packs in found.values()]
    if depth != 1 or counts[0] != counts[1]:
        raise InputError(
            f"`{unpacked}` must hold the {counts[0]:,} sequences of {packed} at depth 1. "
            f"Received: {counts[1]:,} at depth {depth}."
        )
    return found[packed].packing_factor
