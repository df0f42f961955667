"""Table of the fine-tuning tasks, a folder and a row each; no Keras."""

import contextlib
import dataclasses
import importlib
import io

from bert_packed.core.settings import InputError


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of fine-tuning, in the folder `package`.

    Its module `config` has the class of its settings, a `FinetuneConfig`. Its module `task`, imported once
    the backend is chosen, has `finetune`, from such a config and the `Processes` of the run to a
    `FinetuningResult`.
    """

    about: str  # a line of the list of commands
    package: str
    config_name: str
    command: str = "fine_tune"  # the function of `bert_packed.cli`

    @property
    def config(self):
        """Module and name of the class of its settings."""
        return f"{self.package}.config:{self.config_name}"


# The keys are the names of the commands
TASKS = {
    "classify": Task("learning labels of your own", "bert_packed.tasks.classify", "ClassifyConfig"),
    "squad": Task("fine-tuning on SQuAD", "bert_packed.tasks.squad", "SquadConfig", "squad"),
    "glue": Task("fine-tuning on GLUE", "bert_packed.tasks.glue", "GlueConfig"),
    "embed": Task("training of vectors that compare texts", "bert_packed.tasks.embed", "EmbedConfig"),
    "ner": Task("fine-tuning to tag words", "bert_packed.tasks.ner", "NerConfig"),
}


def finetune(config):
    """Fine-tune a packed BERT and score it, or continue a run; prints as it goes.

        config = GlueConfig(task_name="MRPC", data_dir="glue/MRPC", init_checkpoint="run", output_dir="mrpc")
        scores = bert_packed.finetune(config).scores

    Args:
        config: The flags of one of the commands: `ClassifyConfig`, `EmbedConfig`, `GlueConfig`, `NerConfig`,
            `SquadConfig`. In a cluster every process calls this.

    Returns:
        `FinetuningResult` of `bert_packed.tasks.config`.

    Raises:
        InputError: settings, files or an earlier run in the output directory cannot be used, with the words
            of the commands. It is a `ValueError`.
        OSError: a file cannot be read or written.
        MemoryError: the devices have too little memory.
    """
    # The package's first import has this table, and none of these
    from bert_packed.core.hub import with_local_start
    from bert_packed.parallel import cluster
    from bert_packed.training.engines import choose_backend

    # Names are compared, which imports nothing; a class of the same name elsewhere is no task's
    kind = f"{type(config).__module__}:{type(config).__name__}"
    task = next((task for task in TASKS.values() if task.config == kind), None)
    if task is None:
        names = ", ".join(task.config_name for task in TASKS.values())
        raise InputError(f"`config` must be one of {names}. Received: {type(config).__name__}.")
    config.check_inputs()
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(cluster.start(config.distribution, choose_backend()))
        if not processes.is_first:  # whose lines are the same
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        run_directory = importlib.import_module("bert_packed.runs.run_directory")
        config = with_local_start(config, run_directory.begun_flags(config.first_run()))
        return importlib.import_module(f"{task.package}.task").finetune(config, processes)
