"""A manifest beside packs that says what is not so is found out, whatever it lies about."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from recorded_calls import run
from unpacked_records import make_features, read_packs, write_features

from bert_packed import schema
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.verification import compare_files
from data_gen.verify_tfrecords import VerifyConfig, main

S = 16
LENGTHS = np.random.default_rng(5).integers(3, S + 5, 60)
INHERITED = {"vocab_size": 300, "vocab_sha256": "a" * 64, "do_lower_case": True, "objective": "mlm"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Inputs with a vocabulary, and packs of them, some sequences truncated."""
    folder = tmp_path_factory.mktemp("made")
    features = make_features(LENGTHS, S + 5, vocab_size=250)
    features[schema.MASKED_LM_IDS][features[schema.MASKED_LM_WEIGHTS] > 0] += 50  # the largest id is a label
    write_features(folder / "in.tfrecord", features)
    (folder / "manifest.json").write_text(json.dumps(INHERITED))
    settings = {"max_seq_length": S, "overlong": "truncate", "num_shards": 3, "max_sequences_per_pack": 3}
    pack(PackConfig(input_file=f"{folder}/in.tfrecord", output_dir=f"{folder}/packs", **settings))
    return folder


@pytest.fixture
def packs(made, tmp_path):
    return Path(shutil.copytree(made / "packs", tmp_path / "packs"))


def false_claims(packs, input_file, overlong="error"):
    files = sorted(str(path) for path in packs.glob("*.tfrecord"))
    return compare_files([str(input_file)], files, overlong).false_claims


@pytest.fixture
def find(made, packs):
    """Function that finds what is false in the manifest of `packs`."""
    return lambda: false_claims(packs, made / "in.tfrecord", "truncate")


@pytest.fixture
def verify(made):
    """Function that compares packs with the inputs: exit status, the verdict, what is printed below it."""

    def compare(pattern):
        seen = run(main, VerifyConfig, input_file=made / "in.tfrecord", packed_file=pattern)
        _, _, row, *sentences = seen.out.splitlines()
        return seen.status, row.split("  ")[0], sentences

    return compare


def change(folder, edit):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def put(*keys, value):
    """An edit that sets `manifest[key][key]...`: to a value, or what a function makes of the one there."""

    def edit(manifest):
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value(manifest[keys[-1]]) if callable(value) else value

    return edit


def add(number):
    return lambda before: before + number


def test_true_claims_are_accepted(packs, find, verify):
    manifest = json.loads((packs / "manifest.json").read_text())
    assert manifest["num_overlong"]["truncated"]
    assert manifest["plan"]["certificate"]["bounds"].keys() >= {"material", "depth", "L2"}
    assert verify(f"{packs}/*.tfrecord") == (0, "equal", [])
    assert find() == ()
    # a weaker bound than is proven is no lie, if the rest follows from it
    num_packs = manifest["num_packs"]
    weaker = {"lower_bound": 1, "gap": float(num_packs - 1)}
    change(packs, lambda manifest: (manifest.update(weaker), manifest["plan"]["certificate"].update(weaker)))
    assert find() == ()
    change(packs, put("num_packs", value=add(1)))
    status, verdict, sentences = verify(f"{packs}/*.tfrecord")
    assert (status, verdict) == (1, "false manifest") and "`num_packs` must be" in sentences[0]


def swap_lengths(histogram):
    counts = histogram["counts"]
    assert counts[0] != counts[1]
    return {**histogram, "counts": [counts[1], counts[0], *counts[2:]]}


def one_fewer(strategies):
    """A pack fewer of one strategy."""
    place = next(place for place, (_, count) in enumerate(strategies) if count > 1)
    strategies[place][1] -= 1
    return strategies


# Each number of a manifest has its place, and its name in the message where it is off by one
NUMBERS = {
    ("files", 0, "num_records"): "num_records of packed-00000",
    ("num_packs",): "num_packs`",
    ("num_sequences",): "num_sequences`",
    ("depth",): "depth`",
    ("spec", "max_seq_length"): "spec`",
    ("spec", "max_sequences_per_pack"): "spec`",
    ("spec", "max_predictions_per_pack"): "spec`",
    ("histogram", "counts", 0): "histogram`",
    ("histogram", "lengths", 0): "histogram`",
    ("plan", "max_seq_length"): "max_seq_length of the plan",
    ("plan", "certificate", "lower_bound"): "lower_bound of the certificate",
    ("num_records",): "num_records`",
    ("num_overlong", "truncated"): "num_overlong truncated",
    ("num_overlong", "dropped"): "num_overlong dropped",
    ("inputs", 0, "num_records"): "num_records of /",
}
SHARES = {
    ("efficiency",): "efficiency`",
    ("packing_factor",): "packing_factor`",
    ("gap",): "gap`",
    ("plan", "certificate", "gap"): "gap of the certificate",
}
WRONG = [
    *((word, put(*keys, value=add(more))) for keys, word in NUMBERS.items() for more in (1, -1)),
    *((word, put(*keys, value=add(more))) for keys, word in SHARES.items() for more in (1e-6, -1e-6)),
    ("sha256 of packed-00001", put("files", 1, "sha256", value=lambda sha: "0" + sha[1:])),
    ("sha256 of /", put("inputs", 0, "sha256", value="0" * 64)),
    ("histogram`", put("histogram", value=swap_lengths)),
    ("strategies of the plan", put("plan", "strategies", value=one_fewer)),
    ("objective`", put("objective", value="causal_lm")),
    ("objective`", put("objective", value="mlm_nsp")),
    ("objective`", lambda manifest: manifest.pop("objective")),
    ("kind`", put("kind", value="unpacked")),
    ("kind`", lambda manifest: manifest.pop("kind")),
    ("vocab_size`", put("vocab_size", value=add(1))),
    ("vocab_sha256`", put("vocab_sha256", value="b" * 64)),
    ("vocab_sha256`", lambda manifest: manifest.pop("vocab_sha256")),
    ("do_lower_case`", put("do_lower_case", value=False)),
    ("tokenizer` must be in the manifests of the inputs", put("tokenizer", value="byte_bpe")),
]


@pytest.mark.parametrize(("word", "edit"), WRONG, ids=[f"{word}-{i}" for i, (word, _) in enumerate(WRONG)])
def test_every_false_claim_is_named(packs, find, word, edit):
    change(packs, edit)
    sentences = find()
    assert any(word in sentence and "Received: " in sentence for sentence in sentences), sentences
    assert all(sentence.startswith(f"{packs}/manifest.json: ") for sentence in sentences)


def test_limits_are_true_up_to_the_last_number(packs, find):
    text = (packs / "manifest.json").read_text()
    manifest = json.loads(text)
    largest = int(read_packs(sorted(packs.glob("*.tfrecord")))[schema.MASKED_LM_IDS].max())
    bounds = manifest["plan"]["certificate"]["bounds"]
    limits = {
        "`vocab_size` must be above": (("vocab_size",), largest + 1, largest),
        "`max_sequences_per_pack` of the plan": (("plan", "max_sequences_per_pack"), manifest["depth"], 2),
        "`lower_bound` must be at most": (("lower_bound",), max(bounds.values()), max(bounds.values()) + 1),
    }
    for kind, bound in bounds.items():
        limits[f"`bound {kind}` must be at most"] = ("plan", "certificate", "bounds", kind), bound, bound + 1
    assert manifest["depth"] == 3 and len(limits) >= 6
    for word, (keys, last, beyond) in limits.items():
        for value, is_false in ((last, False), (beyond, True)):
            (packs / "manifest.json").write_text(text)
            change(packs, put(*keys, value=value))
            assert any(word in sentence for sentence in find()) == is_false, (word, value)


def pack_lengths(folder, lengths):
    """Pack sequences of these lengths; returns the packs and a function that finds what is false of them."""
    path = write_features(folder / "in.tfrecord", make_features(lengths, S))
    pack(PackConfig(path, f"{folder}/packs", max_seq_length=S, num_workers=1))
    return folder / "packs", lambda: false_claims(folder / "packs", path)


def test_a_bound_without_its_proof_is_false(tmp_path):
    """S=16 holds two of length 6 or 7: 30 packs, where the cheap bounds say 25. The dual values prove it."""
    packs, find = pack_lengths(tmp_path, [6, 7] * 30)
    manifest = json.loads((packs / "manifest.json").read_text())
    cheap = [bound for name, bound in manifest["plan"]["certificate"]["bounds"].items() if name != "LP"]
    assert manifest["num_packs"] == manifest["lower_bound"] == 30 > max(cheap) == 25 and find() == ()
    # The bound does not hold of more packs than there are, even if the plan says so
    change(packs, put("plan", "strategies", value=lambda before: [[one, 2 * n] for one, n in before]))
    change(packs, put("lower_bound", value=60))
    assert any("`lower_bound` must be at most 30, " in sentence for sentence in find())
    (packs / "manifest.json").write_text(json.dumps(manifest))
    change(packs, put("plan", "dual_values", value=[]))
    assert any("`lower_bound` must be at most 25," in sentence for sentence in find())


@pytest.mark.parametrize("claimed, is_true", [(30, True), (31, False)])
def test_dual_values_prove_their_bound_where_another_is_as_good(tmp_path, claimed, is_true):
    """Thirty of length 9 in S = 16 are thirty packs, says L2 as well; manifests may state both."""
    packs, find = pack_lengths(tmp_path, [9] * 30)
    change(packs, put("plan", "dual_values", value=[0] * 8 + [1] + [0] * 7))
    assert "LP" not in json.loads((packs / "manifest.json").read_text())["plan"]["certificate"]["bounds"]
    change(packs, put("plan", "certificate", "bounds", "LP", value=claimed))
    assert (find() == ()) == is_true


@pytest.mark.parametrize(
    "edit",
    [
        lambda manifest: manifest.pop("files"),
        lambda manifest: manifest["plan"].pop("certificate"),
        put("files", value=7),
        put("plan", "strategies", value="many"),
        put("num_overlong", "truncated", value="x"),
        put("histogram", value=None),
    ],
)
def test_what_is_missing_or_of_another_form_is_found(packs, find, edit):
    change(packs, edit)
    assert find()


def test_a_file_that_is_listed_and_missing(packs, verify):
    (packs / "packed-00002-of-00003.tfrecord").unlink()
    status, _, sentences = verify(f"{packs}/*.tfrecord")
    assert status == 1 and sentences[-1].endswith(
        "Received: packed-00002-of-00003.tfrecord, which is missing."
    )


def test_inputs_are_checked_from_any_folder(made, packs, find, monkeypatch):
    relative = os.path.relpath(made / "in.tfrecord", packs)
    lie = {"path": "in.tfrecord", "relative_path": relative, "num_records": 60, "sha256": "0" * 64}
    change(packs, put("inputs", value=[lie]))
    monkeypatch.chdir("/")
    (sentence,) = find()
    assert f"sha256 of {made}/in.tfrecord" in sentence


def test_some_of_the_files_are_held_to_their_own_entries_only(packs, verify):
    change(packs, put("num_packs", value=add(5)))
    change(packs, put("files", 1, "num_records", value=add(5)))
    status, verdict, sentences = verify(f"{packs}/packed-00001*")
    assert (status, verdict) == (1, "different")  # the other packs were not read
    (sentence,) = [sentence for sentence in sentences if "manifest.json" in sentence]
    assert "num_records of packed-00001-of-00003" in sentence


def test_a_folder_may_have_two_names(made, packs, tmp_path):
    """Its packs together are all of the manifest's."""
    (tmp_path / "link").symlink_to(packs)
    first, *others = sorted(packs.glob("*.tfrecord"))
    change(packs, put("num_packs", value=add(5)))
    files = [str(first), *(f"{tmp_path}/link/{path.name}" for path in others)]
    assert "`num_packs`" in " ".join(compare_files([f"{made}/in.tfrecord"], files, "truncate").false_claims)
