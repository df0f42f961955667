"""Export a checkpoint as the command does, compare what two models give, and read a model card."""

import numpy as np

from bert_packed.core.command_line import run
from bert_packed.runs.checkpoint_export import ExportConfig, export_checkpoint


def run_export(**flags):
    return run(export_checkpoint, ExportConfig, ["export", *(f"--{name}={v}" for name, v in flags.items())])


def assert_close(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def sections(card):
    """The text of each section of a model card by its title."""
    parts = [part.partition("\n") for part in card.split("\n## ")[1:]]
    return {title: content.strip() for title, _, content in parts}
