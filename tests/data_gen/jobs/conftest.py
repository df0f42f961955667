"""The jobs that generate data, on a few small files, for tests that kill, continue and distribute them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from causal_files import write_causal
from crash import all_bytes, pack_on_levels
from unpacked_records import make_features, write_features

from bert_packed.text.tokenization import SPECIAL_TOKENS
from data_gen import pack_job, pack_steps
from data_gen.pack_config import PackConfig
from data_gen.text import create_job, create_steps
from data_gen.text.create_config import CreateConfig

S = 32
PACK_STEPS = ("read_file", "sort_run", "merge_runs", "measure_part", "write_shard")
CREATE_STEPS = ("train_vocabulary", "tokenize", "join", "write_shard")
OF_PACKING = (pack_job.pack, PackConfig, "pack_tfrecords.py", pack_job, pack_steps, PACK_STEPS)
OF_CREATING = (
    create_job.create,
    CreateConfig,
    "create_pretraining_data.py",
    create_job,
    create_steps,
    CREATE_STEPS,
)


@dataclasses.dataclass
class JobCase:
    """A job: how it is called, its module and that of its steps, and its settings."""

    function: object
    config_class: type
    script: str
    module: object
    home: object
    steps: tuple
    settings: dict
    whole: Path
    bytes: dict = None
    num_steps: int = 0

    def config(self, folder, **changes):
        return self.config_class(output_dir=str(folder), **{**self.settings, **changes})

    def run(self, folder, **changes):
        """Run it in this process; returns the bytes."""
        self.function(self.config(folder, **changes))
        return all_bytes(folder)

    def argv(self, folder, **changes):
        flags = {**self.settings, "output_dir": folder, **changes}
        path = Path(pack_job.__file__).with_name(self.script)
        return [str(path), *(f"--{name}={value}" for name, value in flags.items())]

    def count_steps(self, patch):
        """List of the names of steps that are done in this process from now on."""
        calls = []

        def counted(step):
            def count(work):
                calls.append(step.__name__)
                return step(work)

            return count

        for name in self.steps:
            patch.setattr(self.home, name, counted(getattr(self.home, name)))
        return calls


def write_inputs(folder):
    """Records, texts and their vocabulary, and causal records, in two files each."""
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(50)]
    (folder / "words").write_text("\n".join([*SPECIAL_TOKENS, *words]))
    for name in "ab":
        write_features(folder / f"{name}.tfrecord", make_features(rng.integers(3, S + 1, 600), S, 7))
        write_causal(folder / f"{name}.causal", rng.integers(2, S + 1, 150))
        documents = ["\n".join(" ".join(rng.choice(words, 9)) for _ in range(8)) for _ in range(25)]
        (folder / f"{name}.txt").write_text("\n\n".join(documents))


def make_jobs(folder):
    """Dict from name to `JobCase`, for the files of `write_inputs`, without what they give."""
    common = {"max_seq_length": S, "num_workers": 1, "provenance": True, "num_shards": 3}
    text = f"{folder}/a.txt:1.25,{folder}/b.txt"
    create = {**common, "input_file": text, "vocab_file": f"{folder}/words", "eval_fraction": 0.1}
    causal = {"objective": "causal_lm", "tokenizer": "byte_bpe", "vocab_size": 300, "vocab_file": ""}
    pack = {**common, "input_file": f"{folder}/?.tfrecord"}
    rows = {"input_file": f"{folder}/?.causal", "split_sequences": True, "num_rows": 4}
    return {
        "pack": JobCase(*OF_PACKING, pack, folder / "pack"),
        "pack on levels": JobCase(pack_on_levels, *OF_PACKING[1:], pack, folder / "pack on levels"),
        "create": JobCase(*OF_CREATING, create, folder / "create"),
        "create causal": JobCase(*OF_CREATING, {**create, **causal}, folder / "create causal"),
        "pack rows": JobCase(*OF_PACKING, {**pack, **rows}, folder / "pack rows"),
    }


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Dict from name to `JobCase`, each done once: the bytes, and how many steps it took."""
    folder = tmp_path_factory.mktemp("jobs")
    write_inputs(folder)
    found = make_jobs(folder)
    for job in found.values():
        with pytest.MonkeyPatch.context() as patch:
            calls = job.count_steps(patch)
            job.bytes = job.run(job.whole)
            job.num_steps = len(calls)
    return found


@pytest.fixture
def own_jobs(tmp_path):
    """The same on files that a test may change."""
    write_inputs(tmp_path)
    return make_jobs(tmp_path)
