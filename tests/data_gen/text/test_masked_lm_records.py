"""Records without next sentences: from text to packs that say so, and to the proof that all are there."""

from pathlib import Path

import numpy as np
import pytest
from text_files import make_config, read_split, restore, write_text

from bert_packed import schema
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.text import create_job
from data_gen.verification import compare_files


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlm")
    config = make_config(write_text(folder), folder / "instances", objective="mlm", dupe_factor=1)
    return folder, create_job.create(config)


def test_records_hold_the_text_and_no_next_sentence(made):
    folder, manifest = made
    features = read_split(folder / "instances", "train")
    assert not features[schema.NEXT_SENTENCE_LABELS].any() and not features[schema.SEGMENT_IDS].any()
    ids = restore(features)
    words = np.sort(ids[ids >= 5])
    counts = np.bincount(words)[5:]
    text = (folder / "text.txt").read_text().split()
    assert counts.tolist() == [text.count(f"doc{i}") for i in range(len(counts))]
    assert (manifest["objective"], manifest["settings"]["objective"]) == ("mlm", "mlm")
    assert "short_seq_prob" not in manifest["settings"]
    assert manifest["splits"]["train"]["num_tokens_cut"] == 0


def test_packs_say_so_too_and_are_proven(made):
    folder, _ = made
    inputs = sorted(str(path) for path in (folder / "instances").glob("train-*"))
    manifest = pack(
        PackConfig(
            input_file=",".join(inputs), output_dir=str(folder / "packed"), max_seq_length=64, num_workers=1
        )
    )
    assert manifest["objective"] == "mlm" and manifest["packing_factor"] > 1.5
    packed = sorted(str(path) for path in Path(folder / "packed").glob("*.tfrecord"))
    found = compare_files(inputs, packed, "error")
    assert found.is_good and found.num_packed_sequences == manifest["num_sequences"]
