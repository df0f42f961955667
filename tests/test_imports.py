"""Imports point one way: the rules of the layout, read from the syntax trees."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("data_gen", "bert_packed", "run_pretraining", "run_squad")
KERAS = {"keras"}
# What a module may import besides the standard library: our modules, and other people's packages
RULES = {
    "data_gen.settings": (set(), set()),
    "data_gen.schema": (set(), set()),
    "data_gen.quiet_import": (set(), set()),
    "data_gen.files": ({"data_gen.quiet_import"}, set()),
    "data_gen.record_frames": ({"data_gen.files"}, set()),
    "data_gen.example_bytes": ({"data_gen.schema"}, {"numpy"}),
    "data_gen.shuffle": (set(), {"numpy"}),
    "data_gen.assignment": ({"data_gen.sequences", "data_gen.shuffle"}, {"numpy"}),
    "data_gen.progress": (set(), set()),
    "data_gen.steps": (
        {"data_gen.files", "data_gen.progress", "data_gen.runners", "data_gen.beam_runner"},
        {"tqdm"},
    ),
    "data_gen.packing.*": ({"data_gen.packing.*"}, {"numpy", "scipy", "highspy"}),
    "data_gen.sequences": (set(), {"numpy"}),
    "data_gen.records": (
        {
            "data_gen.files",
            "data_gen.quiet_import",
            "data_gen.record_frames",
            "data_gen.schema",
            "data_gen.settings",
        },
        {"numpy", "google"},  # TensorFlow comes through quiet_import
    ),
    "bert_packed.config": ({"data_gen.settings"}, set()),
    "bert_packed.dropout": (set(), {"keras", "numpy"}),
    "bert_packed.layers": ({"bert_packed.config", "bert_packed.dropout"}, KERAS),
    "bert_packed.losses": ({"bert_packed.config"}, KERAS),
    "bert_packed.optimization": ({"bert_packed.config"}, KERAS),
    "bert_packed.metrics": (set(), set()),
    "bert_packed.modeling": ({"bert_packed.config", "bert_packed.layers"}, KERAS),
    "bert_packed.engines.variables": (set(), set()),
    "bert_packed.flash_attention": ({"data_gen.settings"}, {"keras", "jax"}),
    "bert_packed.engines": ({"data_gen.quiet_import", "data_gen.settings"}, {"keras"}),
    "bert_packed.engines.functional": (set(), {"keras", "tensorflow", "jax"}),
    "bert_packed.unpacking": (set(), {"numpy"}),
    "bert_packed.contamination": (
        {"bert_packed.engines.functional", "bert_packed.metrics", "bert_packed.unpacking"},
        {"numpy", "keras"},
    ),
    "bert_packed.engines.tensorflow": ({"bert_packed.engines.variables"}, {"tensorflow"}),
    "bert_packed.engines.jax": ({"bert_packed.engines.variables"}, {"jax"}),
    "bert_packed.foreign_names": (set(), set()),
    "bert_packed.foreign_checkpoints": (
        {"bert_packed.config", "bert_packed.foreign_names", "data_gen.settings"},
        {"numpy", "safetensors", "tensorflow"},
    ),
    "bert_packed.export_formats": (
        {
            "bert_packed.engines.variables",
            "bert_packed.foreign_names",
            "data_gen.schema",
            "data_gen.settings",
        },
        {"keras", "numpy", "safetensors", "tensorflow"},
    ),
    "bert_packed.starting_weights": (
        {
            "bert_packed.checkpoint",
            "bert_packed.config",
            "bert_packed.foreign_checkpoints",
            "bert_packed.foreign_names",
            "data_gen.settings",
        },
        set(),
    ),
    "data_gen.squad": ({"data_gen.settings"}, set()),
    "data_gen.squad_windows": ({"data_gen.sequences", "data_gen.tokenization"}, {"numpy"}),
    "data_gen.glue": ({"data_gen.sequences", "data_gen.settings", "data_gen.tokenization"}, {"numpy"}),
    "data_gen.update_packs": (
        {
            "data_gen.assemble",
            "data_gen.assignment",
            "data_gen.packing.*",
            "data_gen.schema",
            "data_gen.sequences",
            "data_gen.settings",
        },
        {"numpy"},
    ),
    "bert_packed.finetuning_losses": ({"bert_packed.layers", "bert_packed.losses"}, KERAS),
    "bert_packed.finetuning_models": (
        {"bert_packed.config", "bert_packed.foreign_names", "bert_packed.layers", "bert_packed.modeling"},
        KERAS,
    ),
    "bert_packed.finetuning_batches": (
        {"data_gen.schema", "data_gen.sequences", "data_gen.update_packs"},
        {"numpy", "tqdm"},
    ),
    "bert_packed.glue_metrics": (set(), {"numpy", "scipy"}),
    "bert_packed.squad_predictions": ({"data_gen.command_line"}, {"numpy"}),
    "bert_packed.input_pipeline": (
        {
            "data_gen.schema",
            "data_gen.records",
            "data_gen.settings",
            "data_gen.packing.online",
            "data_gen.online_assembly",
            "data_gen.read_unpacked",
        },
        {"numpy", "tensorflow"},
    ),
    "bert_packed.stop_request": (set(), set()),
    "bert_packed.training": (
        {"bert_packed.engines.*", "bert_packed.metrics", "bert_packed.stop_request", "data_gen.settings"},
        {"tqdm"},
    ),
}
ENTRY_POINTS = (
    "run_pretraining",
    "run_squad",
    "bert_packed.finetune_glue",
    "data_gen.create_pretraining_data",
    "data_gen.pack_tfrecords",
    "data_gen.verify_tfrecords",
    "data_gen.find_sources",
    "bert_packed.export",
    "bert_packed.audit",
)
ENTRY_LIMIT = 150
TENSORFLOW_IN_DATA_GEN = ["data_gen.files", "data_gen.records"]  # files: URLs only


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {
    module_name(path): path
    for folder in ("data_gen", "bert_packed")
    for path in sorted((ROOT / folder).rglob("*.py"))
} | {path.stem: path for path in sorted(ROOT.glob("run_*.py"))}


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


def matches(name, patterns):
    return any(name == p or (p.endswith(".*") and f"{name}.".startswith(p[:-1])) for p in patterns)


def rule_of(module):
    return next((rule for pattern, rule in RULES.items() if matches(module, [pattern])), None)


@pytest.mark.parametrize("module", [module for module in MODULES if rule_of(module)])
def test_restricted_modules_import_only_what_they_may(module):
    ours, others = rule_of(module)
    for name in imported(MODULES[module]):
        top = name.partition(".")[0]
        if top in OURS:
            assert matches(name, ours), f"{module} imports {name}"
        elif top not in __import__("sys").stdlib_module_names:
            assert top in others, f"{module} imports {name}"


def test_every_rule_has_its_module():
    for pattern in RULES:
        assert any(matches(module, [pattern]) for module in MODULES), pattern


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("data_gen")])
def test_data_gen_knows_nothing_of_training(module):
    for name in imported(MODULES[module]):
        assert name.partition(".")[0] not in ("keras", "bert_packed", "run_pretraining", "tensorflow"), name


def test_tensorflow_enters_data_gen_where_files_are_touched():
    users = [
        module
        for module, path in MODULES.items()
        if module.startswith("data_gen") and "data_gen.quiet_import" in imported(path)
    ]
    assert users == TENSORFLOW_IN_DATA_GEN


def test_layers_do_not_import_one_another():
    siblings = {f"bert_packed.{name}" for name in ("layers", "losses", "optimization")}
    for module in siblings:
        assert not imported(MODULES[module]) & (siblings - {module})


def test_only_reports_import_inference():
    importers = [module for module, path in MODULES.items() if "bert_packed.inference" in imported(path)]
    assert all(module.startswith("bert_packed.reports.") for module in importers)


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
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
