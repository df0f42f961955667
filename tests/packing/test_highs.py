"""HiGHS prints nothing, fails aloud, and gives the same plans beside other programs' models."""

import subprocess
import sys

import highspy
import pytest
from highspy import HighsModelStatus as Status

from bert_packed.packing.integer_programs import make_model, solve

PLAN = "from bert_packed.packing.column_generation import pack_cghp; pack_cghp([0, 16, 5, 7, 15, 0], 6, 3)"
BESIDE_ANOTHER = """
import highspy
import numpy as np
from bert_packed.packing.column_generation import pack_cghp

def run_another(threads):
    model = highspy.Highs()
    model.setOptionValue("threads", threads)
    model.addVar(0.0, 1.0)
    return model.run()

histogram = np.random.default_rng(3).integers(0, 900, 64)
cases = [(histogram, 64, 3), (histogram % 7, 64, 5), ([0, 16, 5, 7, 15, 0, 0, 0, 0, 0], 10, 5)]
plans = [pack_cghp(*case) for case in cases]
for threads in (0, 2):  # 0 = as many as HiGHS likes
    assert run_another(threads) == highspy.HighsStatus.kOk
    again = [pack_cghp(*case) for case in cases]
    assert again == plans and not any(plan.notes for plan in again), again
"""


@pytest.mark.parametrize(("before", "printed"), [("", "a\nb\n"), ("import os; os.close(1); ", "")])
def test_planning_prints_nothing(before, printed):
    code = f"print('a', flush=True); {before}{PLAN}; print('b', flush=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == printed or (before and done.stdout == "a\n")
    assert "HiGHS" not in done.stderr


def test_plans_do_not_depend_on_other_models_of_the_process():
    """HiGHS refuses a number of threads other than that of the first model that was run."""
    done = subprocess.run([sys.executable, "-c", BESIDE_ANOTHER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_end_that_nobody_expects_is_an_error(monkeypatch):
    for least, expected in ((2.0, Status.kInfeasible), (1.0, Status.kOptimal)):
        model = make_model()
        model.addVar(0.0, 1.0)
        model.addRow(least, highspy.kHighsInf, 1, [0], [1.0])
        assert solve(model, Status.kOptimal, Status.kInfeasible) == expected
        with pytest.raises(RuntimeError, match=f"must solve a packing program.*{expected.name}"):
            solve(model, Status.kIterationLimit)
    monkeypatch.setattr(model, "run", lambda: highspy.HighsStatus.kError)
    with pytest.raises(RuntimeError, match=r"must solve a packing program.*kError"):
        solve(model, Status.kNotset)
    with pytest.raises(ValueError, match=r"HiGHS must know its options\. Received: mip_nodes=7"):
        make_model(mip_nodes=7)
