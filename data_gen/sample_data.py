"""Sample data: packs of the embedded corpus, and the questions about this project with their vocabulary."""

import dataclasses
import json
import os
from pathlib import Path

from bert_packed.core.storage import write_whole
from bert_packed.records.provenance import read_manifest
from bert_packed.text import tokenization
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.text.corpus import read_sample_documents
from data_gen.text.create_config import CreateConfig
from data_gen.text.create_job import create

SAMPLE_DIR = "sample_data"
SPLITS = ("train", "eval")
EVAL_FRACTION = 0.05
DUPE_FACTOR = 1  # not the usual 10, to save time


def pack_sample_corpus(config, seconds=None):
    """Pack both splits of the sample corpus: dict from split to the manifest of its packs.

    Instances are in `sample_data/instances_LENGTH`, and created where missing. `seconds`, a
    `defaultdict(dict)`, receives the time of each phase, by split.
    """
    instances = os.path.join(SAMPLE_DIR, f"instances_{config.max_seq_length}")
    output_dir = config.output_dir or os.path.join(SAMPLE_DIR, f"packed_{config.max_seq_length}")
    if read_manifest(instances) is None:  # the manifest is written last, so its instances are complete
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
    """Build missing records of the corpus, in `sample_data/packed_LENGTH` and `unpacked_LENGTH`."""
    for name, depth in (("packed", "max"), ("unpacked", 1)):
        output_dir = os.path.join(SAMPLE_DIR, f"{name}_{max_seq_length}")
        if all(read_manifest(os.path.join(output_dir, split)) for split in SPLITS):
            continue
        config = PackConfig(
            output_dir=output_dir,
            max_seq_length=max_seq_length,
            max_sequences_per_pack=depth,
            overwrite=True,  # leftovers of a killed build
        )
        pack_sample_corpus(config)


QUESTIONS_FILE = Path(__file__).with_name("sample_questions.json")
QUESTIONS_DIR = os.path.join("sample_data", "questions")
VOCAB_SIZE = 8192


def build_vocabulary(do_lower_case=True):
    """Train the vocabulary, if missing, on the embedded corpus and the questions; returns its path."""
    folder = os.path.join(QUESTIONS_DIR, "uncased" if do_lower_case else "cased")
    path = os.path.join(folder, "vocab.txt")
    if not os.path.exists(path):
        articles = json.loads(QUESTIONS_FILE.read_text(encoding="utf-8"))["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        questions = [entry["question"] for paragraph in paragraphs for entry in paragraph["qas"]]
        texts = [*(paragraph["context"] for paragraph in paragraphs), *questions]
        documents = [*read_sample_documents(), texts]
        vocabulary = tokenization.train_vocab(documents, VOCAB_SIZE, do_lower_case)
        os.makedirs(folder, exist_ok=True)
        with write_whole(path) as partial:  # a kill must not leave half a vocabulary
            tokenization.save_vocab(vocabulary, partial)
    return path
