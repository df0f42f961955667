"""Imports point one way: the order of the wings, read from the syntax trees."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A wing imports from itself and from the wings above it; nobody imports a command. Beside each wing: the
# packages of others that it may use.
WINGS = {
    "data_gen.schema": set(),
    "data_gen.cli": {"absl", "numpy", "tabulate", "tqdm"},
    "data_gen.packing": {"numpy", "scipy", "highspy"},  # and nothing of ours: usable alone
    "data_gen.jobs": {"apache_beam", "tqdm"},
    "data_gen.records": {"google_crc32c", "numpy", "google"},  # TensorFlow comes through `quiet_import`
    "data_gen.assembly": {"numpy"},
    "data_gen.text": {"numpy", "pyarrow", "sentencex", "tokenizers", "tqdm"},
    "data_gen.checks": {"numpy", "matplotlib", "tqdm"},
    "data_gen.tasks": {"numpy"},
    "data_gen.sample_data": set(),
    "data_gen commands": {"absl"},
    "bert_packed.config": set(),
    "bert_packed.models": {"keras", "numpy", "jax", "tensorflow"},
    "bert_packed.parallel": {"keras", "numpy", "jax", "tensorflow"},
    "bert_packed.objectives": {"keras"},
    "bert_packed.data": {"numpy", "tensorflow", "tqdm"},
    "bert_packed.torch": {"numpy", "torch"},  # for other people's programs: neither Keras nor TensorFlow
    "bert_packed.training": {"keras", "numpy", "jax", "tensorflow", "tensorboard", "tqdm"},
    "bert_packed.checkpoints": {"keras", "numpy", "safetensors", "tensorflow", "tokenizers"},
    "bert_packed.runs": {"keras", "numpy", "scipy"},
    "bert_packed.evaluation": {"keras", "numpy", "scipy"},
    # the peers that are measured against come in here alone
    "bert_packed.reports": {
        "jax",
        "keras",
        "keras_hub",
        "matplotlib",
        "numpy",
        "scipy",
        "tabulate",
        "tensorflow",
        "torch",
        "transformers",
    },
    "bert_packed commands": {"absl", "keras", "numpy"},
}
COMMANDS = {
    "data_gen.create_pretraining_data": "data_gen commands",
    "data_gen.pack_tfrecords": "data_gen commands",
    "data_gen.verify_tfrecords": "data_gen commands",
    "data_gen.find_sources": "data_gen commands",
    "bert_packed.audit": "bert_packed commands",
    "bert_packed.export": "bert_packed commands",
    "bert_packed.finetune_glue": "bert_packed commands",
    "bert_packed.finetune_ner": "bert_packed commands",
    "bert_packed.squad_eval": "bert_packed commands",
    "run_pretraining": "bert_packed commands",
    "run_squad": "bert_packed commands",
}
HALVES = ("data_gen", "bert_packed")  # their `__init__.py` import nothing
ALONE = ("data_gen.packing",)  # wings that import nothing of ours at all
ENTRY_LIMIT = 150
TENSORFLOW_IN_DATA_GEN = ["data_gen.jobs.files", "data_gen.records.tfrecords"]  # files: URLs only
BACKENDS = {"tensorflow", "jax"}
# Model, losses and optimizer are one code for both backends; what may name one of them, and which
NAMES_A_BACKEND = {
    "bert_packed.models.cpu_forms": {"jax", "tensorflow"},
    "bert_packed.models.flash_attention": {"jax"},
    "bert_packed.models.loops": {"jax", "tensorflow"},
    "bert_packed.data.input_pipeline": {"tensorflow"},
    "bert_packed.training.engines.functional": {"tensorflow", "jax"},
    "bert_packed.training.engines.memory": {"tensorflow", "jax"},
    "bert_packed.training.engines.jax": {"jax"},
    "bert_packed.training.engines.programs": {"tensorflow"},
    "bert_packed.training.engines.virtual_devices": {"tensorflow", "jax"},
    "bert_packed.training.profiling": {"tensorflow", "jax"},
    "bert_packed.training.engines.tensorflow": {"tensorflow"},
    "bert_packed.checkpoints.export_formats": {"tensorflow"},
    "bert_packed.checkpoints.pretrained_files": {"tensorflow"},
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for folder in HALVES for path in sorted((ROOT / folder).rglob("*.py"))} | {
    path.stem: path for path in sorted(ROOT.glob("run_*.py"))
}


def imported(path):
    """Full names of what a file imports; `from a import b` counts as `a.b` where that is a module of ours."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in full}
    return names


def wing_of(module):
    """The wing, of `WINGS`, that a module is in; None in none."""
    if module in COMMANDS:
        return COMMANDS[module]
    return next((wing for wing in WINGS if f"{module}.".startswith(f"{wing}.")), None)


def split(module):
    """What a module imports: our modules, and the top names of other people's packages."""
    found = imported(MODULES[module])
    ours = {name for name in found if name.partition(".")[0] in (*HALVES, "run_pretraining", "run_squad")}
    others = {name.partition(".")[0] for name in found - ours}
    return ours, others - set(sys.stdlib_module_names)


@pytest.mark.parametrize("module", [module for module in MODULES if module not in HALVES])
def test_a_module_imports_only_from_its_wing_and_those_above(module):
    wing = wing_of(module)
    assert wing, f"{module} is in no wing"
    order = list(WINGS)
    allowed = set(order[: order.index(wing) + 1]) - {"data_gen commands", "bert_packed commands"}
    if wing in ALONE:
        allowed = {wing}
    ours, others = split(module)
    for name in ours:
        assert wing_of(name) in allowed, f"{module} imports {name}"
    assert others <= WINGS[wing], f"{module} imports {others - WINGS[wing]}"


def test_every_wing_has_its_modules_and_every_command_its_file():
    assert {wing_of(module) for module in MODULES} - {None} == set(WINGS)
    assert set(COMMANDS) <= set(MODULES)


def test_halves_and_wings_import_nothing_to_be_imported():
    # `bert_packed.training.engines` chooses the backend, which is its question; `bert_packed.torch` is what
    # other people's programs import, and shows them its names
    speaking = ("bert_packed.training.engines", "bert_packed.torch")
    for module, path in MODULES.items():
        if path.name == "__init__.py" and module not in speaking:
            assert not imported(path), module
            assert len(ast.get_docstring(ast.parse(path.read_text())).splitlines()) >= 1, module


def test_no_circles():
    graphlib.TopologicalSorter({module: split(module)[0] for module in MODULES}).prepare()


def test_the_offline_half_knows_nothing_of_training():
    for module in MODULES:
        if module.startswith("data_gen"):
            ours, others = split(module)
            assert not {name for name in ours if not name.startswith("data_gen")}, module
            assert not others & {"keras", *BACKENDS}, module


@pytest.mark.parametrize(
    "wing",
    ["config", "models", "objectives", "data", "training", "checkpoints", "runs", "evaluation"],
)
def test_backends_are_named_in_few_places(wing):
    for module in MODULES:
        if wing_of(module) == f"bert_packed.{wing}":
            assert split(module)[1] & BACKENDS == NAMES_A_BACKEND.get(module, set()), module


def test_tensorflow_enters_data_gen_where_files_are_touched():
    users = [
        module
        for module, path in MODULES.items()
        if module.startswith("data_gen") and "data_gen.cli.quiet_import" in imported(path)
    ]
    assert users == TENSORFLOW_IN_DATA_GEN


def test_only_reports_import_inference():
    name = "bert_packed.evaluation.inference"
    importers = [module for module, path in MODULES.items() if name in imported(path)]
    assert all(module.startswith("bert_packed.reports.") for module in importers)


@pytest.mark.parametrize("entry_point", COMMANDS)
def test_nobody_imports_an_entry_point_and_it_is_short(entry_point):
    for module, path in MODULES.items():
        assert entry_point not in imported(path), f"{module} imports {entry_point}"
    assert len(MODULES[entry_point].read_text().splitlines()) <= ENTRY_LIMIT


def test_no_module_of_odds_and_ends():
    assert not [
        module for module in MODULES if module.rpartition(".")[2] in ("utils", "util", "helpers", "common")
    ]


def test_the_ambiguous_name_stays_in_the_schema():
    for module, path in MODULES.items():
        if module != "data_gen.schema":
            identifiers = {
                node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)
            }
            assert "segment_ids" not in identifiers, module
