"""Imports point one way, by the contracts of pyproject.toml; and what those cannot say: private names."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent
HALVES = ("data_gen", "bert_packed")
OTHER_NAMES = {
    "absl": "absl-py",
    "google": "tensorflow",
    "sklearn": "scikit-learn",
}  # of packages; protobuf comes with TensorFlow

# Owners promise nothing about these, each of which has its reason
PRIVATE = {
    "bert_packed.core.runtime": {"ctypes": "mallopt is a function of the C library alone"},
    "bert_packed.torch.pretraining": {"_attn_implementation": "transformers has a public setter alone"},
    "bert_packed.training.backend": {"_r": "TensorFlow's guide marks a step by it"},
    "bert_packed.training.engines.tensorflow": {
        "jax.interpreters.mlir.make_ir_context": "TensorFlow's program for JAX's absent devices",
        "jaxlib.mlir.ir": "the same",
        "jaxlib.xla_client.DeviceList": "the same",
        "tensorflow.compiler.xla.service.hlo_pb2.HloProto": "XLA's plan of memory; no public package has it",
    },
    "bert_packed.training.optimization": {
        "_all_reduce_sum_gradients": "Keras would add up once more, and asks no one",
        "_get_variable_index": "Keras's own optimizers find moments so, and nothing public does",
    },
    "data_gen.jobs.steps": {"_processes": "a pool kills its workers in public from Python 3.14 on"},
}
PRIVATE_PACKAGES = (
    "jax._src",
    "jax.interpreters",
    "jaxlib.",
    "tensorflow.python",
    "tensorflow.compiler",
    "keras.src",
    "ctypes",
)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


LIBRARY = {module_name(path): path for folder in HALVES for path in sorted((ROOT / folder).rglob("*.py"))}
MODULES = LIBRARY | {path.stem: path for path in sorted(ROOT.glob("run_*.py"))}
ALL = MODULES | {module_name(path): path for path in sorted((ROOT / "benchmarks").rglob("*.py"))}
TREES = {module: ast.parse(path.read_text()) for module, path in ALL.items()}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def names_in(contract):
    """The folders and files that a contract of layers names, from the ground up."""
    names = [name for layer in contract["layers"][::-1] for name in re.split("[|:]", layer)]
    return [name.strip().removeprefix("bert_packed.") for name in names]


ORDER, GENERATORS = map(names_in, CONTRACTS[:2])


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def is_of_self(attribute):
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def own_names(tree):
    """Names that a module gives to its functions, classes, variables and attributes of `self`: set."""
    nodes = list(ast.walk(tree))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    names |= {node.id for node in stored if isinstance(node, ast.Name)}
    return names | {node.attr for node in stored if isinstance(node, ast.Attribute) and is_of_self(node)}


def used_names(tree):
    """Names that a module reads, attributes among them: set."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def private_names(tree, ours, used):
    """Names by which a module reaches into what others keep to themselves.

    `ours` are `own_names`, and `used` the `used_names`, of all modules.
    """
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [start + alias.name for alias in node.names]
            yield from (
                name
                for name in names
                if name.startswith(PRIVATE_PACKAGES) or any(map(is_private, name.split(".")))
            )
        elif isinstance(node, ast.Constant) and str(node.value).startswith(PRIVATE_PACKAGES):
            yield node.value  # as `importlib.import_module` takes it
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            # A base class may be of another module of ours
            if node.attr not in (ours if is_of_self(node) else own) and ast.unparse(node) != "os._exit":
                yield node.attr
        elif isinstance(node, ast.keyword) and is_private(node.arg or ""):
            yield node.arg
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value):
                yield name.value
        elif isinstance(node, ast.ClassDef):
            methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            # Another's base class calls what nothing of ours calls
            yield from (name for name in methods if is_private(name) and name not in used)


def test_no_private_names_of_others_are_used():
    ours, used = (set().union(*map(names, TREES.values())) for names in (own_names, used_names))
    found = {module: set(private_names(tree, ours, used)) for module, tree in TREES.items()}
    expected = {module: set(reasons) for module, reasons in PRIVATE.items()}
    assert {module: names for module, names in found.items() if names} == expected


@pytest.mark.parametrize(
    ("line", "is_seen"),
    [
        ("import jax._src.core", True),
        ("from jax._src import core", True),
        ("from keras import src", True),
        ("from jaxlib import xla_client", True),
        ("from keras import _tf_keras", True),
        ('importlib.import_module("keras.src")', True),
        ("layer._flatten_layers()", True),
        ("self.pool._processes", True),
        ("self._flatten_layers()", True),
        ("config._kind = 3", True),
        ("trace(_r=1)", True),
        ('getattr(layer, "_layers")', True),
        ("class Layer(Base):\n    def _hook(self): pass", True),
        ("os._exit(1)", False),
        ("self._own + self.__dict__", False),  # a base class of ours has it
        ("def _own(): pass\nother._own", False),
        ("class Layer(Base):\n    def _own(self): pass", False),
        ("from jax import numpy", False),
    ],
)
def test_a_private_name_is_found(line, is_seen):
    assert len(list(private_names(ast.parse(line), {"_own"}, {"_own"}))) == is_seen


def test_the_contracts_of_imports_are_kept():
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_folder_has_its_place_in_the_order():
    """A module that the contract does not name may import anything, and be imported by anyone."""
    there = {path.stem for path in (ROOT / "bert_packed").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert there - {"__init__", "__pycache__"} == {*ORDER} - {"data_gen", "benchmarks"}


def packages_of_others(tree):
    """The packages that a module imports, without Python's and ours: set of names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module.partition(".")[0]


def test_every_package_of_others_is_asked_for(monkeypatch):
    """One that is installed by chance works here, and for no user."""
    described = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", described.update)
    runpy.run_path(str(ROOT / "setup.py"))
    lists = [described["install_requires"], *described["extras_require"].values()]
    asked = {re.match(r"[\w-]+", line)[0] for lines in lists for line in lines} | {"jaxlib"}
    found = {name for module in MODULES for name in packages_of_others(TREES[module])}
    others = found - set(sys.stdlib_module_names) - {*HALVES, "run_pretraining", "run_squad"}
    assert {OTHER_NAMES.get(name, name.replace("_", "-")) for name in others} <= asked and len(others) > 15


def test_one_module_imports_the_backend_where_it_may_be_missing():
    quiet = {name for name, path in LIBRARY.items() if "import_quietly(" in path.read_text()}
    assert quiet == {"bert_packed.core.runtime", "bert_packed.training.engines"}


def test_no_module_is_named_utils():
    assert not [name for name in ALL if name.rpartition(".")[2] in ("utils", "util", "helpers", "common")]


def test_the_ambiguous_name_stays_in_the_schema():
    for module in LIBRARY.keys() - {"bert_packed.schema"}:
        identifiers = {node.id for node in ast.walk(TREES[module]) if isinstance(node, ast.Name)}
        assert "segment_ids" not in identifiers, module
