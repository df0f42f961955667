"""Cycles of a block: what a compiler and its listings of kernels say, added up."""

import importlib.util

import keras
import pytest
from benchmark_command import run_benchmark, tables_of

from benchmarks.block_cycles import kernel_cycles

LISTING = """
control target key start
     0   :  { %s1_s0 = inlined }
   0x1   :  { %2 = vsyncpa }
   0x2 LB: > { %s9_s1 = sadd.s32 1, %s8_s3 /* copy for cssa */ }
   0x3   :  {}
   0x4 LB: >> { %v4 = vld ;;  %s7_s0 = sadd.s32 2, %s6_s2 }
   0x5   : >> { %v5 = vadd ;;  %p6 = scmp.ge.s32.totalorder %s7_s0, 6 /* loop exit test */ }
   0x6 PF: > { %v6 = vst
second_minor_factor: 1 */ }
   0x7   : > { %p8 = scmp.ge.s32.totalorder %s9_s1, 10 /* loop exit test */ }
   0x8   :  { %10 = sbr.rel (!%p8) target = $region1 }
   0x9   : > { %s11 = smov %s9_s1 }
   0xa   :  {}
"""


def test_instructions_of_loops_count_as_often_as_they_go_round():
    assert kernel_cycles(LISTING) == 2 + 10 * (4 + 3 * 2) + 1 + 2


def test_a_loop_of_unknown_length_is_refused():
    with pytest.raises(ValueError, match="a constant number of rounds"):
        kernel_cycles(LISTING.replace("%s7_s0, 6", "%s7_s0, %s8_s1"))


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"widths": "768,"}, "whole numbers above 0"),
        ({"packs": "0"}, "whole numbers above 0"),
        ({"bert_config_file": "bert-tiny"}, "must be a Mamba or Mamba-2"),
    ],
)
def test_bad_flags_are_one_line(capsys, flags, message):
    assert run_benchmark("block_cycles", **flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax")
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="pip install -e '.[aot]'")
def test_a_block_is_in_kernels_or_in_loops(tmp_path):
    """Once: a process reads where to write its listings as libtpu is loaded."""
    flags = {"bert_config_file": "mamba2-tiny", "widths": 128, "packs": 1, "max_seq_length": 256}
    kernels, loops = tables_of("block_cycles", tmp_path, **flags)["blocks"]
    assert kernels["loops, ms"] == 0 < kernels["kernels, ms"]
    assert loops["kernels, ms"] == 0 < loops["loops, ms"]
    for row in (kernels, loops):
        assert row["products, ms"] > 0 < row["the rest, ms"]
        assert row["ms"] == pytest.approx(
            sum(row[f"{group}, ms"] for group in ("products", "the rest", "loops", "kernels"))
        )
    assert kernels["ms"] < loops["ms"]
