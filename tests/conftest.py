"""Setup shared by all tests: a quiet TensorFlow, the same random cases in every run, and cheap programs."""

import gc
import multiprocessing
import os
import tempfile

import pytest
from file_processes import pytest_addoption, pytest_configure  # noqa: F401  hooks
from hypothesis import settings
from uncompiled import run_uncompiled

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# Tiny programs compile for longer than they run, again and again: they are little optimised, and kept for
# this run of pytest and its commands. Both backends are set, as some tests use the other one too. A user's
# values stay, as `XLA_FLAGS= JAX_DISABLE_MOST_OPTIMIZATIONS=0` in a tier of CI.
COMPILED = tempfile.TemporaryDirectory()
os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
# JAX compiles each operation by itself outside of a program
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if os.environ.get("KERAS_BACKEND") != "jax":
    # XLA has emitters of fused loops beside its older ones; compiling takes a third less without them
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    )
    os.environ.setdefault(
        "TF_XLA_FLAGS", f"--tf_xla_persistent_cache_directory={os.environ['JAX_COMPILATION_CACHE_DIR']}"
    )

# Workers that a test starts from here come from one fork server, which has imported TensorFlow once. Commands
# in processes of their own, and those of `crash.py`, spawn theirs as for a user.
get_context = multiprocessing.get_context
get_context("forkserver").set_forkserver_preload(["data_gen.pack_job", "data_gen.text.create_job"])
multiprocessing.get_context = lambda method=None: get_context("forkserver" if method == "spawn" else method)

# These take a minute and more each: begun last, one would run when all others are done
SLOW_FILES = [
    "test_several_processes",
    "test_documented_commands",
    "test_sweep",
    "test_layouts",
    "test_layout_runs",
    "test_run_pretraining",
    "test_remat",
    "test_other_backend",
    "test_pretraining_mistakes",
    "test_crash",
    "test_audit",
    "test_end_to_end",
    "test_engine",
    "test_replicas",  # not beside test_run_pretraining: the two would take most of 2 GB
]

gc.set_threshold(100_000, 20, 20)
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture
def uncompiled():
    """Steps made meanwhile run operation by operation under TensorFlow, where a test is not about compiling.

    One of a tiny model takes a fraction of a second so, and ten seconds to compile.
    """
    with run_uncompiled():
        yield


@pytest.fixture(scope="module")
def uncompiled_file():
    """As `uncompiled`, for a whole file and its own fixtures."""
    with run_uncompiled():
        yield
