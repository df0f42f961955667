"""Fine-tuning as a function: from a config and files to a trained model, predictions and scores."""

from bert_packed.core.settings import InputError
from bert_packed.tasks.config import GlueConfig, NerConfig, SquadConfig
from bert_packed.tasks.glue.task import finetune_glue
from bert_packed.tasks.ner.task import finetune_ner
from bert_packed.tasks.squad.task import finetune_squad

TASKS = {SquadConfig: finetune_squad, GlueConfig: finetune_glue, NerConfig: finetune_ner}


def finetune(config):
    """Fine-tune a packed BERT and score it, or continue a run; prints as it goes.

        config = GlueConfig(task_name="MRPC", data_dir="glue/MRPC", init_checkpoint="run", output_dir="mrpc")
        scores = bert_packed.finetune(config).scores

    Args:
        config: `SquadConfig`, `GlueConfig` or `NerConfig` of `bert_packed.tasks.config`: the flags
            of the three commands.

    Returns:
        `FinetuningResult`, of that module.

    Raises:
        InputError: settings, files or an earlier run in the output directory cannot be used, with the words
            of the commands. It is a `ValueError`.
        OSError: a file cannot be read or written.
        MemoryError: the devices have too little memory.
    """
    if type(config) not in TASKS:
        names = ", ".join(one.__name__ for one in TASKS)
        raise InputError(f"`config` must be one of {names}. Received: {type(config).__name__}.")
    return TASKS[type(config)](config)
