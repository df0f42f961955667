"""`bert-packed audit-hf` on tiny models that transformers has saved: its rows, exit statuses and mistakes."""

import json

import pytest
from recorded_calls import assert_refused, run
from reference import import_reference

torch, transformers = import_reference()
from transformers_models import build  # noqa: E402

from bert_packed.torch.audit_hf import AuditHFConfig, main  # noqa: E402

NEIGHBOURS, ALONE = "neighbors: change of outputs", "unpacked: outputs"


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A function from a kind to the name of a folder with such a model."""
    monkeypatch.chdir(tmp_path)

    def save(kind):
        build(kind).save_pretrained(kind)
        return kind

    return save


# Exact arguments, what the first row fails by, and the exit status
@pytest.mark.parametrize(
    ("kind", "flags", "exact", "fails", "status"),
    [
        ("bert", {}, ["attention='mask', first_position=0"], "", 0),
        ("bert", {"attention": "varlen"}, [], NEIGHBOURS, 1),
        ("roberta", {"attn_implementation": "eager"}, ["attention='mask', first_position=1"], ALONE, 0),
        ("opt", {"attention": "mask"}, ["attention='mask', first_position=0"], "", 0),
    ],
)
def test_a_row_for_each_way_and_the_status(saved, kind, flags, exact, fails, status):
    seen = run(main, AuditHFConfig, model=saved(kind), json="rows.json", **flags)
    with open("rows.json") as file:
        rows = json.load(file)
    assert seen.status == status, seen.error
    assert [row["arguments of PackingCollator"] for row in rows if row["exact"] == "yes"] == exact
    assert rows[0]["what fails"] == fails and all(row["what fails"] in seen.out for row in rows)


def test_mistakes_are_one_line(saved):
    bert = f"./{saved('bert')}"
    transformers.BertConfig().save_pretrained("empty")
    for flags, message in [
        ({}, "`model` must be given"),
        (
            {"model": "./none"},
            "`model` must be a folder, or the prefix of a TensorFlow checkpoint, that exists",
        ),
        (
            {"model": "./empty"},
            "`model` must be one that transformers loads, with these settings. Received: ./e",
        ),
        ({"model": bert, "attn_implementation": "flash_attention_2"}, "FlashAttention2 has been toggled on"),
        ({"model": bert, "device": "xpu:9"}, "Received: ./bert; "),
        ({"model": bert, "attention": "sliding"}, "`attention` must be one of all, mask, positions, varlen"),
    ]:
        assert_refused(main, AuditHFConfig, message, **flags)
