"""`--compile_for`: what the compilers of absent accelerators refuse, in one line each."""

import re

import pytest
from compile_for_command import MICRO, command, write_all

pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("aot"))


@pytest.mark.parametrize(
    ("target", "packs", "micro"),
    [
        ("v5e:1", 1 << 23, MICRO),  # whose ids alone fill the memory, as libtpu sees at once
        ("h100:1", 1 << 18, 1 << 18),
    ],
)
def test_a_batch_that_is_too_large(folder, target, packs, micro):
    done, report = command(folder, target, train_batch_size=packs, micro_batch_size=micro)
    assert (done.returncode, report) == (2, None), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("run_pretraining.py")]
    assert f"small enough for the devices of compile_for={target}. Received: {micro}, for which" in line
    needs, has = (float(size) for size in re.findall(r"([\d.]+)G", line))
    assert needs > has > 15


def test_the_options_for_cpus_are_refused(folder):
    """A control: with them a rematerialised block keeps barriers that no GPU has."""
    code = (
        "import sys\n"
        "from bert_packed import cli\n"
        "from bert_packed.parallel.targets import Target\n"
        "Target.compiler_options = Target('cpu').compiler_options\n"
        "sys.exit(cli.run_command('pretrain'))"
    )
    done, report = command(folder, "h100:1", start=["-c", code], remat=True)
    assert (done.returncode, report) == (2, None)
    assert "Received: h100:1, which says INTERNAL: Unsupported instruction opcode: opt-barrier" in done.stderr
    done, report = command(folder, "h100:1", remat=True)
    assert done.returncode == 0 and report["matmul_flops"] > 0, done.stderr


def test_devices_that_no_compiler_knows(folder):
    done, _ = command(folder, "v5e:3x3")
    assert done.returncode == 2 and "as their compiler knows them. Received: v5e:3x3" in done.stderr
    done, _ = command(folder, "v5e:2x2", "tensorflow")
    assert done.returncode == 2 and "one device unless KERAS_BACKEND=jax" in done.stderr
    done, _ = command(folder, "v5e:2x2", layout="megatron1d", mesh="1,2")
    assert done.returncode == 2 and "must have all 4 devices of compile_for=v5e:2x2" in done.stderr
