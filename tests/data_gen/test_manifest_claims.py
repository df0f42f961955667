"""A manifest beside packs that says what is not so is found out, whatever it lies about."""

import dataclasses
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from unpacked_records import make_features, write_features

from bert_packed import schema
from bert_packed.assembly.record_kinds import BertKind, plan_lengths
from bert_packed.core.command_line import run
from bert_packed.packing import plan as plans
from bert_packed.packing.histogram import to_json
from bert_packed.records.read_bert import read_packed, read_unpacked
from bert_packed.records.record_rules import read_pack_spec
from bert_packed.schema import PackSpec
from data_gen.manifest_claims import FileFacts, find_false_claims
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
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


def facts_of(path):
    """Facts about a file of packs."""
    found = FileFacts()
    for part in read_packed(str(path)):
        found.add_packs(part, len(set(part["record_numbers"].tolist())))
        found.add_lengths(part["lengths"])
    return found


@pytest.fixture(scope="module")
def facts(made):
    """Facts about the files, read once."""
    paths, inputs = sorted((made / "packs").glob("*.tfrecord")), FileFacts()
    for part in read_unpacked(f"{made}/in.tfrecord"):
        inputs.num_records += len(part)
        inputs.num_overlong.update(BertKind(S, "truncate").fit(part)[1])
    assert inputs.num_records == 60 and inputs.num_overlong["truncated"] > 3
    packed = {path.name: facts_of(path) for path in paths}
    return packed, {f"{made}/in.tfrecord": inputs}, read_pack_spec([str(paths[0])])


@pytest.fixture
def find(packs, facts):
    """Function that finds what is false in the manifest of `packs`."""
    packed, inputs, spec = facts
    return lambda: find_false_claims({f"{packs}/{name}": its for name, its in packed.items()}, inputs, spec)


@pytest.fixture
def verify(made, capsys):
    """Function that compares packs with the inputs: exit status, the verdict, what is printed below it."""

    def compare(pattern):
        flags = (f"--input_file={made}/in.tfrecord", f"--packed_file={pattern}")
        status = run(main, VerifyConfig, ["verify_tfrecords.py", *flags])
        lines = capsys.readouterr().out.splitlines()
        return status, lines[2].split("  ")[0], lines[3:]

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
    assert find() == []
    # a weaker bound than is proven is no lie, if the rest follows from it
    num_packs = manifest["num_packs"]
    weaker = {"lower_bound": 1, "gap": float(num_packs - 1)}
    change(packs, lambda manifest: (manifest.update(weaker), manifest["plan"]["certificate"].update(weaker)))
    assert find() == []
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


def test_limits_are_true_up_to_the_last_number(packs, facts, find):
    text = (packs / "manifest.json").read_text()
    manifest = json.loads(text)
    largest = max(its.largest_id for its in facts[0].values())
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


def find_false_bounds(folder, real, said, lower_bound, bounds=None):
    """False claims about bounds in a manifest that has the plan `said`, beside packs of the plan `real`."""
    (folder / "x.tfrecord").write_bytes(b"packs")
    plan = said.to_json()
    plan["certificate"]["bounds"].update(bounds or {})
    manifest = {"kind": "packed", "inputs": [], "num_records": 0, "num_overlong": {}, "plan": plan}
    manifest |= {name: getattr(real, name) for name in ("num_packs", "num_sequences", "efficiency", "depth")}
    manifest |= {"packing_factor": real.packing_factor, "histogram": to_json(real.histogram())}
    manifest |= {"lower_bound": lower_bound, "gap": (real.num_packs - lower_bound) / lower_bound}
    manifest["spec"] = {"max_seq_length": S, "max_sequences_per_pack": 2, "max_predictions_per_pack": 1}
    manifest["files"] = [{"name": "x.tfrecord", "num_records": real.num_packs, "sha256": ""}]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    facts = FileFacts(real.num_packs, depth=real.depth, strategies=Counter(real.strategies))
    facts.add_lengths(np.repeat(np.arange(1, S + 1), real.histogram()))
    found = find_false_claims({str(folder / "x.tfrecord"): facts}, {}, PackSpec(**manifest["spec"]))
    assert "sha256" in found[0]
    return [sentence for sentence in found if "must be at most" in sentence]


def test_a_bound_without_its_proof_is_false(tmp_path):
    """S=16 holds two of length 6 or 7: 30 packs, where the cheap bounds say 25. The dual values prove it."""
    plan = plans.from_json(plan_lengths([0] * 5 + [30, 30] + [0] * 9, "cghp", S, "max")["plan"])
    cheap = [bound for name, bound in plan.certificate.bounds.items() if name != "LP"]
    assert plan.num_packs == plan.certificate.lower_bound == 30 > max(cheap) == 25
    assert find_false_bounds(tmp_path, plan, plan, 30) == []
    without = dataclasses.replace(plan, dual_values=())
    (sentence,) = find_false_bounds(tmp_path, plan, without, 30)
    assert "`lower_bound` must be at most 25," in sentence
    # The bound does not hold of more packs than there are either, even if the plan beside it says so
    twice = dataclasses.replace(plan, strategies={key: 2 * count for key, count in plan.strategies.items()})
    assert "`lower_bound` must be at most 30, " in find_false_bounds(tmp_path, plan, twice, 60)[0]


@pytest.mark.parametrize("claimed, is_true", [(30, True), (31, False)])
def test_dual_values_prove_their_bound_where_another_is_as_good(tmp_path, claimed, is_true):
    """Thirty of length 9 in S = 16 are thirty packs, says L2 as well; manifests may state both."""
    plan = plans.make_plan("cghp", S, "max", [((9,), 30)], (), [0] * 8 + [1] + [0] * 7)
    assert "LP" not in plan.certificate.bounds and plan.certificate.lower_bound == 30
    assert (find_false_bounds(tmp_path, plan, plan, 30, {"LP": claimed}) == []) == is_true


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


def test_inputs_are_checked_from_any_folder(packs, facts, monkeypatch):
    packed, inputs, spec = facts
    (path,) = inputs
    relative = os.path.relpath(path, packs)
    lie = {"path": "in.tfrecord", "relative_path": relative, "num_records": 60, "sha256": "0" * 64}
    change(packs, put("inputs", value=[lie]))
    monkeypatch.chdir("/")
    (sentence,) = find_false_claims({f"{packs}/{name}": its for name, its in packed.items()}, inputs, spec)
    assert f"sha256 of {path}" in sentence


def test_some_of_the_files_are_held_to_their_own_entries_only(packs, verify):
    change(packs, put("num_packs", value=add(5)))
    change(packs, put("files", 1, "num_records", value=add(5)))
    status, verdict, sentences = verify(f"{packs}/packed-00001*")
    assert (status, verdict) == (1, "different")  # the other packs were not read
    (sentence,) = [sentence for sentence in sentences if "manifest.json" in sentence]
    assert "num_records of packed-00001-of-00003" in sentence
