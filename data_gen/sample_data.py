"""Instances of the embedded sample corpus, which are packed without an input file."""

import dataclasses
import os

from bert_packed.records.manifests import read_manifest
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.text.create_config import CreateConfig
from data_gen.text.create_job import create

SAMPLE_DIR = "sample_data"
SPLITS = ("train", "eval")
EVAL_FRACTION = 0.05
DUPE_FACTOR = 1  # not the usual 10: to try the software, not to wait for it


def pack_sample_corpus(config, seconds=None):
    """Pack both splits of the sample corpus, whose instances are created where they are missing.

    Instances are in `sample_data/instances_LENGTH`, packs in `train` and `eval` of the output directory,
    which is `sample_data/packed_LENGTH` where the config names none.

    Args:
        config: `PackConfig` without an `input_file`.
        seconds: `defaultdict(dict)` that receives, by split, the time of each phase; None where nobody asks.

    Returns:
        Dict from split to the manifest of its packs.

    Raises:
        InputError: an output directory is in use, or the corpus cannot be built.
    """
    instances = os.path.join(SAMPLE_DIR, f"instances_{config.max_seq_length}")
    output_dir = config.output_dir or os.path.join(SAMPLE_DIR, f"packed_{config.max_seq_length}")
    if read_manifest(instances) is None:  # the manifest comes last: with it, all instances are there
        create(
            CreateConfig(
                output_dir=instances,
                max_seq_length=config.max_seq_length,
                eval_fraction=EVAL_FRACTION,
                dupe_factor=DUPE_FACTOR,
            )
        )
    manifests = {}
    for split in SPLITS:
        split_config = dataclasses.replace(
            config,
            input_file=os.path.join(instances, f"{split}-*.tfrecord"),
            output_dir=os.path.join(output_dir, split),
        )
        manifests[split] = pack(split_config, None if seconds is None else seconds[split])
    return manifests


def build_missing(max_seq_length=512):
    """Build the packed and the unpacked records of the sample corpus where they are missing.

    They are in `sample_data/packed_LENGTH` and `sample_data/unpacked_LENGTH`, each with `train` and `eval`.
    """
    for name, depth in (("packed", "max"), ("unpacked", 1)):
        output_dir = os.path.join(SAMPLE_DIR, f"{name}_{max_seq_length}")
        if all(read_manifest(os.path.join(output_dir, split)) for split in SPLITS):
            continue
        config = PackConfig(
            output_dir=output_dir,
            max_seq_length=max_seq_length,
            max_sequences_per_pack=depth,
            overwrite=True,  # what a killed build left behind
        )
        pack_sample_corpus(config)
