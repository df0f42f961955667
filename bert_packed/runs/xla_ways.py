"""XLA's ways to compile for a CPU: which there are, and which a run tries."""

import statistics

from bert_packed.runs.this_machine import has_wide_vectors
from bert_packed.runs.turns import median_interval, ratios

DEFAULT = "as it is"
WIDE_VECTORS, NO_YNNPACK = "vectors of 512 bits", "no YNNPACK"
# By name, what is added to XLA_FLAGS. Which of them a release knows differs: an unknown one ends the process.
# Not among them: oneDNN (`--xla_cpu_experimental_onednn_custom_call=true`), which TensorFlow 2.21 and JAX
# 0.10 read without an error and without compiling anything else, as their wheels are built without it
WAYS = {
    DEFAULT: "",
    WIDE_VECTORS: "--xla_cpu_prefer_vector_width=512",
    "no fusion emitters": "--xla_cpu_use_fusion_emitters=false",
    "no XNNPACK": "--xla_cpu_use_xnnpack=false",
    "YNNPACK for products": "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT",
    NO_YNNPACK: "--xla_cpu_experimental_ynn_fusion_type=",
}
# What a backend's default is already
SAME_AS_DEFAULT = {"tensorflow": (NO_YNNPACK,), "jax": ()}


def ways_of(backend):
    """Names of all ways that differ under a backend, the default first: list of keys of `WAYS`."""
    return [name for name in WAYS if name not in SAME_AS_DEFAULT[backend]]


def ways_to_try(backend):
    """Names of the ways that may be the fastest on this CPU, the default first: list of keys of `WAYS`.

    Those that were not faster on any CPU are left out (docs/results.md, "A step by parts").
    """
    worth = [WIDE_VECTORS] if has_wide_vectors() else []
    return [name for name in ways_of(backend) if name in (DEFAULT, *worth, NO_YNNPACK)]


def way_rows(seconds):
    """How long steps took, beside the first way's.

    Args:
        seconds: Dict from a way to the seconds of its steps, one a turn, or to [] where it gave none.

    Returns:
        List of dicts: `XLA_FLAGS`, the way; `step, s`, the median; `times as long` as the first's of the same
        turn, the median; `from` and `to`, its interval (95 %). The last four are None without steps.
    """
    baseline, rows = next(iter(seconds.values())), []
    for way, its in seconds.items():
        numbers = dict.fromkeys(("step, s", "times as long", "from", "to"))
        if its and baseline:
            found = ratios(its, baseline)
            low, high = median_interval(found)
            numbers = {
                "step, s": statistics.median(its),
                "times as long": statistics.median(found),
                "from": low,
                "to": high,
            }
        rows.append({"XLA_FLAGS": way, **numbers})
    return rows
