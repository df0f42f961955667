"""Packs for causal language modelling hold every sequence once, told by a plain reading of the records."""

import dataclasses

import numpy as np
import pytest
from causal_files import make_sequences, read_examples, sequences_of, write_causal, write_sequences
from crash import all_bytes
from unpacked_records import make_features, write_features

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.packing.algorithms import ALGORITHM_NAMES
from bert_packed.records import first_records, tfrecords
from bert_packed.records.provenance import find_sources
from data_gen import pack_job, pack_steps
from data_gen.dry_run import report_choices
from data_gen.pack_config import PackConfig
from data_gen.verification import compare_files

S = 24
LENGTHS = np.random.default_rng(1).integers(1, S + 1, 80).tolist()


def pack(folder, input_file, **changed):
    """Pack; returns the manifest and the packs, in order."""
    given = {"max_seq_length": S, "num_workers": 1, "num_shards": 3, **changed}
    manifest = pack_job.pack(PackConfig(input_file=str(input_file), output_dir=str(folder), **given))
    return manifest, read_examples(folder.glob("packed-*.tfrecord"))


def content(sequences):
    """What must be conserved of sequences, in a form that can be sorted."""
    names = (schema.INPUT_IDS, schema.LABEL_IDS, schema.LABEL_MASK, schema.NUM_BYTES)
    return sorted([features[name] for name in names] for features in sequences)


@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
@pytest.mark.parametrize("depth", ["max", 3])
def test_every_algorithm_packs_every_sequence_once(tmp_path, algorithm, depth):
    sequences = make_sequences(LENGTHS)
    path = write_sequences(tmp_path / "in.tfrecord", sequences)
    manifest, packs = pack(tmp_path / "out", path, algorithm=algorithm, max_sequences_per_pack=depth)
    found = [sequence for packed in packs for sequence in sequences_of(packed)]
    assert content(found) == content(sequences)
    assert all(
        sequence[schema.POSITION_IDS] == list(range(len(sequence[schema.INPUT_IDS]))) for sequence in found
    )
    assert manifest["objective"] == "causal_lm" and manifest["num_packs"] == len(packs) < 80
    spec = first_records.read_pack_spec([str(path) for path in (tmp_path / "out").glob("*.tfrecord")])
    assert dataclasses.asdict(spec) == manifest["spec"] and spec.objective == "causal_lm"
    assert spec.max_sequences_per_pack == (3 if depth == 3 else manifest["depth"])
    result = compare_files(
        [path], [str(path) for path in sorted((tmp_path / "out").glob("*.tfrecord"))], "error"
    )
    assert result.is_good and result.num_packed_sequences == 80


def test_a_pack_looks_like_the_picture(tmp_path):
    """`schema.py` shows it; sequences stand in ascending length."""
    pieces = [
        {
            schema.INPUT_IDS: [0, 7, 4, 8],
            schema.LABEL_IDS: [7, 4, 8, 9],
            schema.LABEL_MASK: [1, 1, 1, 1],
            schema.NUM_BYTES: [14],
        },
        {
            schema.INPUT_IDS: [0, 5, 0],
            schema.LABEL_IDS: [5, 0, 0],
            schema.LABEL_MASK: [1, 1, 0],
            schema.NUM_BYTES: [3],
        },
    ]
    path = write_sequences(tmp_path / "in.tfrecord", pieces)
    (_, (found,)) = pack(tmp_path / "out", path, max_seq_length=8, max_sequences_per_pack=3)
    assert found == {
        schema.INPUT_IDS: [0, 5, 0, 0, 7, 4, 8, 0],
        schema.INPUT_MASK: [1, 1, 1, 2, 2, 2, 2, 0],
        schema.POSITION_IDS: [0, 1, 2, 0, 1, 2, 3, 0],
        schema.LABEL_IDS: [5, 0, 0, 7, 4, 8, 9, 0],
        schema.LABEL_MASK: [1, 1, 0, 2, 2, 2, 2, 0],
        schema.SEQUENCE_WEIGHTS: [1, 1, 0],
        schema.SEQUENCE_BYTES: [3, 14, 0],
    }


@pytest.mark.parametrize("length", [1024, 4096, 5000])
def test_long_packs(tmp_path, length):
    lengths = np.random.default_rng(2).integers(1, length + 1, 30).tolist()
    sequences = make_sequences(lengths)
    path = write_sequences(tmp_path / "in.tfrecord", sequences)
    _, packs = pack(tmp_path / "out", path, max_seq_length=length)
    assert content([sequence for packed in packs for sequence in sequences_of(packed)]) == content(sequences)


@pytest.mark.parametrize("changed", [{}, {"split_sequences": True, "num_rows": 3}])
def test_small_runs_and_parts_give_the_same_bytes(tmp_path, monkeypatch, changed):
    for seed, name in enumerate("ab"):
        write_causal(tmp_path / f"{name}.tfrecord", LENGTHS, seed)
    given = {"input_file": tmp_path / "?.tfrecord", "provenance": True, **changed}
    pack(tmp_path / "whole", **given)
    monkeypatch.setattr(pack_steps, "RUN_BYTES", 40 * S)
    monkeypatch.setattr(tfrecords, "READ_BATCH", 16)
    monkeypatch.setattr(pack_steps, "PACKS_AT_ONCE", 2)
    pack(tmp_path / "small", **given)
    assert all_bytes(tmp_path / "small") == all_bytes(tmp_path / "whole")


def test_provenance_leads_to_the_records(tmp_path):
    sequences = make_sequences(LENGTHS)
    path = write_sequences(tmp_path / "in.tfrecord", sequences)
    pack(tmp_path / "out", path, provenance=True)
    for shard in sorted((tmp_path / "out").glob("packed-*.tfrecord")):
        for number, packed in enumerate(read_examples([shard]), 1):
            sources = find_sources(str(shard), number)
            wanted = [sequences[record - 1] for _, record in sources]
            assert [content([one]) for one in sequences_of(packed)] == [content([one]) for one in wanted]


def test_overlong_sequences(tmp_path):
    sequences = make_sequences([5, S + 1, 7])
    path = write_sequences(tmp_path / "in.tfrecord", sequences)
    with pytest.raises(
        InputError, match=r"in\.tfrecord, record 2: .* at most max_seq_length=24 .* 25 tokens"
    ):
        pack(tmp_path / "out", path)
    manifest, packs = pack(tmp_path / "out", path, overlong="drop")
    assert manifest["num_overlong"]["dropped"] == 1 and manifest["num_records"] == 3
    found = [sequence for packed in packs for sequence in sequences_of(packed)]
    assert content(found) == content([sequences[0], sequences[2]])
    files = [str(path) for path in sorted((tmp_path / "out").glob("*.tfrecord"))]
    assert compare_files([path], files, "drop").is_good
    assert not compare_files([path], files, "error").is_good


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"overlong": "truncate"}, "`overlong` must be error or drop with records for causal_lm"),
        (
            {"max_predictions_per_pack": 7},
            "`max_predictions_per_pack` must be left out with records for causal_lm",
        ),
        ({"num_rows": 2}, "`num_rows` must be given with --split_sequences only"),
        ({"split_sequences": True}, "`num_rows` must be at least 1"),
        ({"split_sequences": True, "num_rows": 81}, "`num_rows` must be at most the number of sequences, 80"),
        (
            {"split_sequences": True, "num_rows": 1, "overlong": "drop"},
            "`overlong` must be left out with --split",
        ),
        (
            {"split_sequences": True, "num_rows": 1, "max_sequences_per_pack": 2},
            "`max_sequences_per_pack` must be left out with --split_sequences",
        ),
        ({"split_sequences": True, "num_rows": 1, "algorithm": "lpfhp"}, "`algorithm` must be left out"),
    ],
)
def test_settings_that_such_records_cannot_follow(tmp_path, changed, message):
    path = write_causal(tmp_path / "in.tfrecord", LENGTHS)
    with pytest.raises(InputError, match=message):
        pack(tmp_path / "out", path, **changed)
    assert not (tmp_path / "out/manifest.json").exists()


def test_rows_are_not_for_bert(tmp_path):
    path = write_features(tmp_path / "in.tfrecord", make_features([5, 8], 8))
    with pytest.raises(InputError, match="`split_sequences` must be left out with records for mlm_nsp"):
        pack(tmp_path / "out", path, split_sequences=True, num_rows=1)


def test_records_of_two_objectives(tmp_path):
    write_features(tmp_path / "a.tfrecord", make_features([5, 8], 8))
    write_causal(tmp_path / "b.tfrecord", LENGTHS)
    with pytest.raises(InputError, match=r"all files must be for one objective\. Received: .*a\.tfrecord"):
        pack(tmp_path / "out", tmp_path / "?.tfrecord")


def test_ids_outside_the_vocabulary_of_the_manifest(tmp_path):
    path = write_causal(tmp_path / "in.tfrecord", LENGTHS)
    (tmp_path / "manifest.json").write_text('{"vocab_size": 7}')
    for changed in ({}, {"split_sequences": True, "num_rows": 2}):
        with pytest.raises(InputError, match="below the vocab_size=7"):
            pack(tmp_path / "out", path, **changed)


def test_a_dry_run_counts_their_lengths(tmp_path):
    path = write_causal(tmp_path / "in.tfrecord", LENGTHS)
    config = PackConfig(
        input_file=path,
        dry_run=True,
        max_seq_length=S,
        max_sequences_per_pack=2,
        output_dir=str(tmp_path / "out"),
    )
    rows, _ = report_choices(config)
    (row,) = [row for row in rows if row["max_seq_length"] == S]
    assert row["packs"] >= row["lower_bound"] > 0 and row["depth"] <= 2
