"""Every sequence of a pack can be traced to its input record, and every record to its document."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from unpacked_records import list_packed, list_unpacked, make_features, write_features

from data_gen import records, schema
from data_gen.create_config import CreateConfig
from data_gen.create_files import create
from data_gen.pack_config import PackConfig
from data_gen.pack_files import pack
from data_gen.provenance import find_sources, provenance_path
from data_gen.settings import InputError
from data_gen.tokenization import SPECIAL_TOKENS

S = 16


def test_every_sequence_of_a_pack_is_found_in_its_source(tmp_path):
    inputs = {}
    for seed, name in enumerate(("a", "b")):
        lengths = np.random.default_rng(seed).integers(2, S + 1, 50)
        features = make_features(lengths, S, seed)
        inputs[write_features(tmp_path / f"{name}.tfrecord", features)] = list_unpacked(features)
    out = tmp_path / "out"
    manifest = pack(
        PackConfig(
            input_file=f"{tmp_path}/*.tfrecord",
            output_dir=str(out),
            max_seq_length=S,
            num_shards=3,
            provenance=True,
        )
    )
    seen = set()
    for entry in manifest["files"]:
        path = str(out / entry["name"])
        spec = records.read_pack_spec([path])
        sizes = {name: spec.size(kind) for name, kind in schema.PACKED_LENGTHS.items()}
        (batch,) = records.read_batches(path)
        arrays = records.parse_examples(batch, sizes, path, 1)
        found = iter(list_packed(arrays))
        for number in range(1, entry["num_records"] + 1):
            for source, record in find_sources(path, number):
                assert next(found) == inputs[source][record - 1]
                seen.add((source, record))
        assert next(found, None) is None
        # compact: a few bytes a sequence
        assert Path(provenance_path(path)).stat().st_size < 1000
    assert len(seen) == 100
    with pytest.raises(InputError, match=r"must have the record\. Received: 0 of"):
        find_sources(path, 0)


def test_without_an_index_there_is_an_error(tmp_path):
    path = write_features(tmp_path / "a.tfrecord", make_features([3], S))
    with pytest.raises(
        InputError, match=r"must be packed with --provenance\. Received: no .*a\.provenance\.npz"
    ):
        find_sources(path, 1)


def test_every_record_names_its_document(tmp_path):
    words = [f"doc{i}" for i in range(20)]
    (tmp_path / "words.txt").write_text("\n".join([*SPECIAL_TOKENS, *words]))
    for name, some in (("a", words[:12]), ("b", words[12:])):
        text = "\n\n".join("\n".join([f"{word} {word} {word}"] * 5) for word in some)
        (tmp_path / f"{name}.txt").write_text(text)
    config = CreateConfig(
        input_file=f"{tmp_path}/a.txt,{tmp_path}/b.txt",
        vocab_file=f"{tmp_path}/words.txt",
        output_dir=str(tmp_path / "out"),
        max_seq_length=S,
        num_shards=2,
        num_workers=1,
        provenance=True,
    )
    manifest = create(config)
    assert [entry["num_documents"] for entry in manifest["inputs"]] == [12, 8]
    num_records = 0
    for entry in manifest["splits"]["train"]["files"]:
        path = str(tmp_path / "out" / entry["name"])
        with np.load(provenance_path(path)) as index:
            documents, duplicates = index["document_numbers"], index["duplicates"]
        assert len(documents) == entry["num_records"] and set(duplicates) <= set(range(10))
        for record, document in zip(records.read_records(path), documents, strict=True):
            lengths = records.feature_lengths(record, path, 1, [schema.INPUT_IDS])
            assert lengths[schema.INPUT_IDS] == S
            features = tf.train.Example.FromString(record).features.feature
            ids = list(features[schema.INPUT_IDS].int64_list.value)
            labels = features[schema.MASKED_LM_IDS].int64_list.value
            weights = features[schema.MASKED_LM_WEIGHTS].float_list.value
            for position, label, weight in zip(
                features[schema.MASKED_LM_POSITIONS].int64_list.value, labels, weights, strict=True
            ):
                ids[position] = label if weight else ids[position]
            assert ids[1] - len(SPECIAL_TOKENS) == document  # sentence A is of the document
            num_records += 1
    assert num_records == manifest["splits"]["train"]["num_sequences"]
