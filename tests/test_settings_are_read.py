"""Every setting of every command is read somewhere, and none is passed on under another's name.

By the syntax trees of the sources. That a value which is read has its effect, the tests of its command show.
"""

import ast
import dataclasses
from pathlib import Path

import pytest

from bert_packed.cli import COMMANDS

ROOT = Path(__file__).parents[1]
SOURCES = [*ROOT.glob("run_*.py"), *ROOT.glob("bert_packed/**/*.py"), *ROOT.glob("data_gen/**/*.py")]
TREES = {path: ast.parse(path.read_text()) for path in SOURCES}
CLASSES = [command.load_config() for command in COMMANDS.values()]
SETTINGS = {field.name for config_class in CLASSES for field in dataclasses.fields(config_class)}
OTHER_NAMES = {"num_packs"}  # of the audit, which makes one batch of them
CHECKS = ("__post_init__", "check_given")  # of a config: what they read has no other effect


def walk(node, skips):
    for child in ast.iter_child_nodes(node):
        if not skips(child):
            yield child
            yield from walk(child, skips)


def is_check(node):
    return isinstance(node, ast.FunctionDef) and (node.name in CHECKS or node.name.startswith("_check"))


def setting_of(node):
    """The name of a setting that is read from a config, or None."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
        if owner in ("config", "self", "steps", "given", "settings", "overrides"):
            return node.attr if node.attr in SETTINGS else None
    return None


READ = {setting_of(node) for tree in TREES.values() for node in walk(tree, is_check)}
# `getattr` reads these, from a tuple of names
READ |= {
    node.value
    for tree in TREES.values()
    for top in tree.body
    if isinstance(top, ast.Assign)
    for node in ast.walk(top.value)
    if isinstance(node, ast.Constant) and node.value in SETTINGS
}


@pytest.mark.parametrize("config_class", CLASSES, ids=lambda one: one.__name__)
def test_every_setting_is_read(config_class):
    assert {field.name for field in dataclasses.fields(config_class)} - READ == set()


def parameters():
    """The parameters of functions and classes that are defined once, by name."""
    found = {}
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
                found.setdefault(node.name, []).append(names)
            elif isinstance(node, ast.ClassDef):
                made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
                names = [each.arg for each in made[0].args.args[1:]] if made else []
                fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]
                found.setdefault(node.name, []).append(names or fields)
    return {name: lists[0] for name, lists in found.items() if len(lists) == 1}


def passed(node, known):
    """Pairs of a parameter and the setting that a call gives it."""
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    positional = [] if any(isinstance(each, ast.Starred) for each in node.args) else node.args
    pairs = [*zip(known.get(name, ()), positional, strict=False), *((k.arg, k.value) for k in node.keywords)]
    return [(parameter, setting_of(value)) for parameter, value in pairs if setting_of(value)]


def test_no_setting_is_passed_on_as_another():
    """A parameter may have a setting's name without its first words: `batch_size` of `train_batch_size`."""
    known, num_right, crossed = parameters(), 0, []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            for parameter, name in passed(node, known) if isinstance(node, ast.Call) else ():
                num_right += parameter == name
                if parameter in SETTINGS and not name.endswith(parameter) and name not in OTHER_NAMES:
                    crossed.append(f"{path.relative_to(ROOT)}:{node.lineno}: {parameter}={name}")
    assert crossed == []
    assert num_right > 80
