"""What packing asks of a kind of records stands in one place, and all kinds answer it."""

import ast
import inspect
from pathlib import Path

import pytest

from bert_packed.assembly.bert_data import BertData
from bert_packed.assembly.causal_data import CausalData
from bert_packed.assembly.feature_data import FeatureData
from bert_packed.assembly.feature_spec import parse_features
from bert_packed.assembly.pack_data import PackData
from bert_packed.assembly.row_data import RowData
from bert_packed.core.settings import InputError
from bert_packed.schema import PackSpec
from data_gen import pack_inputs, pack_job, pack_steps, row_steps

MEMBERS = {name for name in vars(PackData) if not name.startswith("_")}


def asked_of_data(module):
    """Names of the attributes of anything called `data` in a module."""
    found = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if getattr(owner, "id", getattr(owner, "attr", None)) == "data":
                found.add(node.attr)
    return found


def test_packing_asks_for_all_of_it_and_for_nothing_else():
    assert asked_of_data(pack_steps) | asked_of_data(pack_job) == MEMBERS
    # and where sequences are laid into rows, only for what reading them needs
    needed = asked_of_data(pack_inputs) | asked_of_data(row_steps)
    assert needed <= {name for name in dir(RowData) if not name.startswith("_")}
    assert all(inspect.getdoc(vars(PackData)[name]) for name in MEMBERS)


@pytest.mark.parametrize(
    "data",
    [
        BertData(16, "error", None, 0),
        CausalData(16, "error", None),
        FeatureData(parse_features("a:int:4,b:int:8"), "error"),
    ],
)
def test_all_kinds_answer(data):
    assert isinstance(data, PackData)
    public = {name for name in dir(type(data)) if not name.startswith("_")}
    settings = set(inspect.signature(type(data)).parameters)
    assert public - settings - {"leaders"} == MEMBERS
    assert {"file_indices", "record_numbers"} <= data.layout.keys() and set(
        data.measured_columns
    ) <= data.layout.keys()
    for name in MEMBERS:
        wanted, given = (getattr(kind, name) for kind in (PackData, type(data)))
        if inspect.isfunction(wanted):
            assert [*inspect.signature(wanted).parameters] == [*inspect.signature(given).parameters], name


def test_room_for_predictions_is_what_the_fullest_pack_needs_or_what_is_asked_for():
    def room(asked, measured):
        return BertData(16, "error", None, asked).make_spec(3, measured)

    for asked, measured, found in ((0, 5, 5), (0, 0, 1), (5, 5, 5), (7, 5, 7), (1, 0, 1)):
        assert room(asked, measured) == PackSpec(16, 3, found)
    with pytest.raises(InputError, match=r"must be at least 6, .* Received: 5\."):
        room(5, 6)
