"""Model cards: the figures of run and manifests, and a line for each that is unknown."""

import hashlib
import json

import pytest
from exports import sections
from tiny import CONFIG, make_engine

from bert_packed.architectures.registry import ablate
from bert_packed.core.settings import InputError
from bert_packed.runs.exports import read_audit, read_origin, write_model_card
from bert_packed.runs.pretraining_config import PretrainingConfig

WIKI = "hf://datasets/who/wiki@main/text.txt"

AUDIT = [
    {"name": "output leak", "worst": 0.0, "limit": 0, "result": "pass"},
    {"name": "loss", "worst": 0.25, "limit": 1e-05, "result": "FAIL"},
]


def sha(name):
    return hashlib.sha256(name.encode()).hexdigest()


@pytest.fixture
def run(tmp_path):
    """A run of packs, which were made of instances of two texts; the dict of its `run.json`."""
    packs = tmp_path / "packs" / "p.tfrecord"
    write(packs.parent / "manifest.json", {
        "kind": "packed", "plan": {}, "num_sequences": 12345, "num_packs": 6789, "packing_factor": 1.8184,
        "efficiency": 0.98765, "spec": {"max_seq_length": 24, "max_sequences_per_pack": 5},
        "vocab_size": 31, "vocab_sha256": sha("vocab"), "do_lower_case": False,
        "files": [{"name": "p.tfrecord", "sha256": sha("p")}],
        "inputs": [{"path": "gone/i.tfrecord", "relative_path": "../made/i.tfrecord", "sha256": sha("i")}],
    })  # fmt: skip
    write(tmp_path / "made" / "manifest.json", {
        "kind": "unpacked", "splits": {"train": {"files": [{"name": "i.tfrecord", "sha256": sha("i")}]}},
        "inputs": [{"path": WIKI, "sha256": sha("w"), "num_documents": 4321}],
    })  # fmt: skip
    record = {
        "flags": {"num_train_steps": 2000, "train_batch_size": 10, "output_dir": "/home/me",
                  "objective": "mlm", "init_checkpoint": "owner/start@" + 40 * "7", "lamb_beta": 7,
                  "num_warmup_steps": PretrainingConfig.num_warmup_steps},
        "inputs": {"input_file": [{"path": str(packs), "sha256": sha("p")}]},
        "model": {}, "data": {"packing_factor": 1.8184},
        "segments": [{"backend": "tensorflow"}, {"backend": "jax"}, {"backend": "jax"}],
        "result_files": [],
    }  # fmt: skip
    write(tmp_path / "run" / "run.json", record)
    return record


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def card_of(folder, config=CONFIG, **facts):
    write_model_card(folder, make_engine(config=config).model, **facts)
    return (folder / "README.md").read_text()


def test_a_card_with_all_facts(run, tmp_path):
    (tmp_path / "tokenizer_config.json").touch()
    scored = run | {"scores": {"step": 1400.0, "loss": 2.345671}}
    text = card_of(tmp_path, run=scored, step=1500, audit=AUDIT, languages="en,de")
    head, code = text.split("---\n")[1], text.partition("```python\n")[2].partition("```")[0]
    assert head.endswith("language: [en,de]\nbase_model: [owner/start]\ndatasets: [who/wiki]\n")
    assert code.splitlines() == [
        "from transformers import AutoTokenizer, BertForPreTraining",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_NAME")',
        'model = BertForPreTraining.from_pretrained("FOLDER_OR_NAME")',
    ]
    card = sections(text)
    assert card["Data"].splitlines() == [
        "- 12,345 sequences; files of records: 1",
        f"- vocabulary of 31, cased, SHA-256 `{sha('vocab')}`",
        f"- text: {WIKI}, SHA-256 `{sha('w')}`, 4,321 documents",
    ]
    assert card["Packing"].splitlines()[-1] == "| 6,789 | 24 | 5 | 1.818 | 98.77 % |"
    assert card["Recipe"].split("\n\n")[0].splitlines() == [
        "1,500 optimizer steps of 2,000.",
        "A step is 10 packs, 18.2 sequences on average.",
        "Trained under tensorflow, then jax.",
    ]
    # Settings at their defaults would bury the others; one of another version is kept
    start = f"--init_checkpoint=owner/start@{40 * '7'}"
    flags = card["Recipe"].split("```")[1].split()
    assert flags == [
        "--num_train_steps=2000",
        "--train_batch_size=10",
        "--objective=mlm",
        start,
        "--lamb_beta=7",
    ]
    assert card["Held-out scores"] == "- step: 1400\n- loss: 2.34567"
    assert card["Audit"].startswith("1 of 2 checks passed. Failed: loss.")
    assert "| loss | 0.25 | 1e-05 | FAIL |" in card["Audit"]


def test_what_has_changed_since_is_not_known(run, tmp_path):
    manifest = tmp_path / "made" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(sha("i"), sha("other")))
    assert sections(card_of(tmp_path, run=run, step=1))["Data"].endswith("- text: not known")
    manifest = tmp_path / "packs" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(sha("p"), sha("other")))
    card = sections(card_of(tmp_path, run=run, step=1))
    assert card["Data"] == card["Packing"] == "Not known."


def test_a_card_of_a_model_without_a_run(tmp_path):
    assert read_origin(tmp_path / "theirs") == (None, None)
    text = card_of(tmp_path)
    card = sections(text)
    assert not [name for name in ("language:", "base_model:", "datasets:", "AutoTokenizer") if name in text]
    assert {card[name] for name in ("Held-out scores", "Data", "Packing", "Recipe")} == {"Not known."}
    assert card["Audit"].startswith("Not known: ")


def test_an_ablation_is_told_first(tmp_path):
    card = card_of(tmp_path, config=ablate(CONFIG, "no_attention_mask"))
    assert "**Packing was broken on purpose: no_attention_mask.**" in card.partition("## ")[0]


def test_the_origin_of_a_checkpoint_is_its_run(run, tmp_path):
    for step in (5, 12):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir()
    assert read_origin(tmp_path / "run") == (run | {"scores": {}}, 12)
    # A model has the scores of its own step, or of an earlier one
    (tmp_path / "run" / "eval_metrics.csv").write_text("step,loss,accuracy\n4,2.5,\n12,2.25,0.5\n")
    assert read_origin(tmp_path / "run")[0]["scores"] == {"step": 12, "loss": 2.25, "accuracy": 0.5}
    of_five = run | {"scores": {"step": 4, "loss": 2.5}}
    assert read_origin(str(tmp_path / "run" / "checkpoint-5")) == (of_five, 5)


@pytest.mark.parametrize("content", ['{"name": 1}', "[1]", "{"])
def test_another_file_is_no_audit(tmp_path, content):
    (tmp_path / "audit.json").write_text(content)
    with pytest.raises(InputError, match=r"audit\.json"):
        read_audit(tmp_path / "audit.json")
    (tmp_path / "audit.json").write_text(json.dumps(AUDIT))
    assert read_audit(tmp_path / "audit.json") == AUDIT
