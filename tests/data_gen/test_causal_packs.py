"""Packs for causal language modelling hold every sequence once, as a plain reading of the records finds."""

import dataclasses

import numpy as np
import pytest
from causal_files import make_sequences, read_examples, sequences_of, write_causal, write_sequences

from bert_packed import schema
from bert_packed.assembly.record_kinds import CausalKind
from bert_packed.core.settings import InputError
from bert_packed.packing.algorithms import ALGORITHM_NAMES
from bert_packed.records import record_rules
from bert_packed.records.read_causal import read_causal
from data_gen import pack_job
from data_gen.pack_config import PackConfig
from data_gen.verification import compare_files

S = 24
LENGTHS = np.random.default_rng(1).integers(1, S + 1, 80).tolist()
SPLIT = {"split_sequences": True, "num_rows": 3}


def pack(folder, input_file, **changed):
    """Pack; returns the manifest and the packs, in order."""
    given = {"max_seq_length": S, "num_workers": 1, "num_shards": 3, **changed}
    manifest = pack_job.pack(PackConfig(input_file=str(input_file), output_dir=str(folder), **given))
    return manifest, read_examples(folder.glob("packed-*.tfrecord"))


def content(sequences):
    """The content of sequences that packing must conserve, in a form that can be sorted."""
    names = (schema.INPUT_IDS, schema.LABEL_IDS, schema.LABEL_MASK, schema.NUM_BYTES)
    return sorted([features[name] for name in names] for features in sequences)


@pytest.mark.parametrize(("algorithm", "depth"), [("cghp", "max"), *((name, 3) for name in ALGORITHM_NAMES)])
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
    paths = sorted(map(str, (tmp_path / "out").glob("*.tfrecord")))
    spec = record_rules.read_pack_spec(paths)
    assert dataclasses.asdict(spec) == manifest["spec"] and spec.objective == "causal_lm"
    assert spec.max_sequences_per_pack == (3 if depth == 3 else manifest["depth"])
    result = compare_files([path], paths, "error")
    assert result.is_good and result.num_packed_sequences == 80


def test_a_pack_looks_like_the_picture(tmp_path):
    """`schema.py` shows it; lengths ascend."""
    names = (schema.INPUT_IDS, schema.LABEL_IDS, schema.LABEL_MASK, schema.NUM_BYTES)
    pieces = [([0, 7, 4, 8], [7, 4, 8, 9], [1, 1, 1, 1], [14]), ([0, 5, 0], [5, 0, 0], [1, 1, 0], [3])]
    pieces = [dict(zip(names, piece, strict=True)) for piece in pieces]
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


def test_overlong_sequences_are_never_truncated(tmp_path):
    """Bytes of lost labels cannot be distinguished from the others."""
    sequences = make_sequences([5, S + 1, 7])
    path = write_sequences(tmp_path / "in.tfrecord", sequences)
    message = rf"in\.tfrecord, record 2: .* at most max_seq_length={S} .* Received: {S + 1} tokens"
    with pytest.raises(InputError, match=message):
        pack(tmp_path / "out", path)
    (read,) = read_causal(path)
    with pytest.raises(InputError, match=message):
        CausalKind(S, "truncate").fit(read)
    assert CausalKind(S + 1, "truncate").fit(read) == (read, {"truncated": 0, "dropped": 0})
    manifest, packs = pack(tmp_path / "out", path, overlong="drop")
    assert manifest["num_overlong"] == {"truncated": 0, "dropped": 1} and manifest["num_records"] == 3
    found = [sequence for packed in packs for sequence in sequences_of(packed)]
    assert content(found) == content([sequences[0], sequences[2]])
    files = [str(path) for path in sorted((tmp_path / "out").glob("*.tfrecord"))]
    assert compare_files([path], files, "drop").is_good
    assert not compare_files([path], files, "error").is_good


@pytest.mark.parametrize("changed", [{}, SPLIT])
def test_ids_outside_the_vocabulary_of_the_manifest(tmp_path, changed):
    path = write_causal(tmp_path / "in.tfrecord", LENGTHS)
    (tmp_path / "manifest.json").write_text('{"vocab_size": 7}')
    with pytest.raises(InputError, match="below the vocab_size=7"):
        pack(tmp_path / "out", path, **changed)
