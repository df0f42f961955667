"""Imports point one way: the order of the folders, read from the syntax trees."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# From the ground up: a folder imports from itself and from those above it in this list. Beside each: the
# packages of others that it may use.
ORDER = {
    "bert_packed.core": {"absl", "numpy", "tabulate", "tqdm"},
    "bert_packed.schema": set(),
    "bert_packed.packing": {"numpy", "scipy", "highspy"},
    "bert_packed.records": {"google_crc32c", "numpy", "google"},
    "bert_packed.assembly": {"numpy", "jax", "torch"},  # a mask in the library of its ids
    "bert_packed.text": {"numpy", "tokenizers"},
    "bert_packed.layers": {"keras", "numpy", "jax", "tensorflow"},
    "bert_packed.architectures": {"keras", "numpy"},
    "bert_packed.kernels": {"keras", "jax"},
    "bert_packed.parallel": {"keras", "numpy", "jax", "tensorflow"},
    "bert_packed.objectives": {"keras"},
    "bert_packed.data": {"numpy", "tqdm"},
    "bert_packed.training": {
        "google",
        "keras",
        "numpy",
        "jax",
        "jaxlib",
        "tensorflow",
        "tensorboard",
        "tqdm",
    },
    "bert_packed.checkpoints": {"keras", "numpy", "safetensors", "tensorflow", "tokenizers"},
    "bert_packed.runs": {"keras", "numpy"},
    "bert_packed.tasks": {"keras", "numpy", "scipy", "tqdm"},
    "bert_packed.evaluation": {"keras", "numpy", "torch", "tqdm"},
    "bert_packed.torch": {"numpy", "torch"},
    "data_gen.jobs": {"apache_beam", "tqdm"},
    "data_gen.text": {"numpy", "pyarrow", "sentencex", "tokenizers", "tqdm"},
    "data_gen": {"numpy", "matplotlib", "tqdm"},
    "bert_packed.text_to_model": set(),
    "commands": {"absl", "keras", "numpy"},
    "benchmarks": {"jax", "keras", "keras_hub", "matplotlib", "numpy", "scipy", "tabulate", "tensorflow"}
    | {"torch", "transformers"},
}
COMMANDS = [
    "bert_packed.__main__",
    "bert_packed.cli",
    "data_gen.create_pretraining_data",
    "data_gen.pack_tfrecords",
    "data_gen.verify_tfrecords",
    "data_gen.find_sources",
    "run_pretraining",
    "run_squad",
]
HALVES = ("data_gen", "bert_packed")
# Model, losses and optimizer are one code for both backends. Besides `parallel`, whose layouts are JAX's
# alone, and `benchmarks`, these modules import one
IMPORTS_A_BACKEND = {
    "bert_packed.assembly.block_attention_mask": {"jax"},
    "bert_packed.layers.cpu_gradients": {"jax", "tensorflow"},
    "bert_packed.kernels.gpu.attention": {"jax"},
    "bert_packed.kernels.gpu.selective_scan": {"jax"},
    "bert_packed.kernels.tpu.attention": {"jax"},
    "bert_packed.layers.loops": {"jax", "tensorflow"},
    "bert_packed.kernels.tpu.calls": {"jax"},
    "bert_packed.kernels.tpu.convolution": {"jax"},
    "bert_packed.kernels.tpu.duality": {"jax"},
    "bert_packed.kernels.tpu.selective_scan": {"jax"},
    "bert_packed.training.absent_devices": {"jax"},
    "bert_packed.training.backend": {"tensorflow", "jax"},
    "bert_packed.training.engines.jax": {"jax"},
    "bert_packed.training.profiling": {"tensorflow", "jax"},
    "bert_packed.training.engines.tensorflow": {"tensorflow"},
    "bert_packed.checkpoints.export_formats": {"tensorflow"},
    "bert_packed.checkpoints.pretrained_files": {"tensorflow"},
}

# What its owners promise nothing about, each name with the reason for it
PRIVATE = {
    "bert_packed.core.runtime": {"ctypes": "mallopt is a function of the C library alone"},
    "bert_packed.torch.pretraining": {"_attn_implementation": "transformers has a public setter alone"},
    "bert_packed.training.absent_devices": {
        "jax.interpreters.mlir.make_ir_context": "TensorFlow's program for JAX's absent devices",
        "jaxlib.mlir.ir": "the same",
        "jaxlib.xla_client.DeviceList": "the same",
    },
    "bert_packed.training.optimization": {
        "_all_reduce_sum_gradients": "Keras would add up once more, and asks no one",
        "_get_variable_index": "Keras's own optimizers find moments so, and nothing public does",
    },
    "bert_packed.training.profiling": {"_r": "TensorFlow's guide marks a step by it"},
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


def folder_of(module):
    """The key of `ORDER` that a module belongs to; None where it belongs to none."""
    if module in COMMANDS:
        return "commands"
    return max((name for name in ORDER if f"{module}.".startswith(f"{name}.")), key=len, default=None)


def imported(module):
    """Our modules that a module imports, and the packages of others: two sets of names."""
    names = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in ALL else node.module for name in full}
    ours = {name for name in names if name.partition(".")[0] in (*HALVES, "benchmarks") or name in COMMANDS}
    return ours, {name.partition(".")[0] for name in names - ours} - set(sys.stdlib_module_names)


def test_imports_follow_the_order():
    order, against = list(ORDER), []
    for module in ALL.keys() - {"bert_packed"}:
        folder = folder_of(module)
        ours, others = imported(module)
        allowed = set(order[: order.index(folder) + 1])
        if folder == "bert_packed.packing":  # usable alone
            allowed = {folder}
        if folder.startswith("data_gen"):  # neither half imports the other's upper layers
            allowed -= set(order[order.index("bert_packed.layers") : order.index("data_gen.jobs")])
        against += [f"{module} imports {name}" for name in sorted(ours) if folder_of(name) not in allowed]
        against += [f"{module} imports {name}" for name in sorted(others - ORDER[folder])]
        if folder != "commands":
            against += [f"{module} imports a command" for name in ours if name in COMMANDS]
    assert not against
    assert {folder_of(module) for module in ALL} - {None} == set(ORDER)
    graphlib.TopologicalSorter({module: imported(module)[0] for module in ALL}).prepare()  # no circles


def test_few_modules_import_a_backend():
    named = {
        module: imported(module)[1] & {"tensorflow", "jax"}
        for module in MODULES
        if folder_of(module) != "bert_packed.parallel"
    }
    assert {module: found for module, found in named.items() if found} == IMPORTS_A_BACKEND
    quiet = {name for name, path in LIBRARY.items() if "import_quietly(" in path.read_text()}
    # URLs; the backend that a command chooses
    assert quiet == {
        "bert_packed.core.runtime",
        "bert_packed.core.storage",
        "bert_packed.training.engines",
    }


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


def private_doors(tree, ours, used):
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
            # What nothing of ours calls, another's base class does
            yield from (name for name in methods if is_private(name) and name not in used)


def test_no_private_doors():
    ours, used = (set().union(*map(names, TREES.values())) for names in (own_names, used_names))
    found = {module: set(private_doors(tree, ours, used)) for module, tree in TREES.items()}
    expected = {module: set(reasons) for module, reasons in PRIVATE.items()}
    assert {module: names for module, names in found.items() if names} == expected


@pytest.mark.parametrize(
    "line",
    [
        "import jax._src.core",
        "from jax._src import core",
        "from keras import src",
        "from jaxlib import xla_client",
        "from keras import _tf_keras",
        'importlib.import_module("keras.src")',
        "layer._flatten_layers()",
        "self.pool._processes",
        "self._flatten_layers()",
        "config._kind = 3",
        "trace(_r=1)",
        'getattr(layer, "_layers")',
        "class Layer(Base):\n    def _hook(self): pass",
    ],
)
def test_a_private_door_is_seen(line):
    assert len(list(private_doors(ast.parse(line), {"_own"}, {"_own"}))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "os._exit(1)",
        "self._own + self.__dict__",  # of a base class of ours
        "def _own(): pass\nother._own",
        "class Layer(Base):\n    def _own(self): pass",
        "from jax import numpy",
    ],
)
def test_no_other_door_is_private(line):
    assert not list(private_doors(ast.parse(line), {"_own"}, {"_own"}))


def test_no_module_of_odds_and_ends():
    assert not [name for name in ALL if name.rpartition(".")[2] in ("utils", "util", "helpers", "common")]


def test_the_ambiguous_name_stays_in_the_schema():
    for module in LIBRARY.keys() - {"bert_packed.schema"}:
        identifiers = {node.id for node in ast.walk(TREES[module]) if isinstance(node, ast.Name)}
        assert "segment_ids" not in identifiers, module
