"""HiGHS prints nothing, in a process whose standard output is whole afterwards, open or closed."""

import subprocess
import sys

import pytest

from bert_packed.packing.quiet_highs import make_model

PLAN = "from bert_packed.packing.column_generation import pack_cghp; pack_cghp([0, 16, 5, 7, 15, 0], 6, 3)"


@pytest.mark.parametrize(("before", "printed"), [("", "a\nb\n"), ("import os; os.close(1); ", "")])
def test_planning_prints_nothing(before, printed):
    code = f"print('a', flush=True); {before}{PLAN}; print('b', flush=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == printed or (before and done.stdout == "a\n")
    assert "HiGHS" not in done.stderr


def test_options_arrive_beside_the_common_ones():
    model = make_model(mip_max_nodes=7, threads=1)
    names = ("mip_max_nodes", "threads", "random_seed", "output_flag")
    assert [model.getOptionValue(name)[1] for name in names] == [7, 1, 0, False]
