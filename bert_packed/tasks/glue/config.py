"""Settings of fine-tuning on GLUE; names are those of google-research/bert's run_classifier.py."""

import dataclasses
from pathlib import Path

from bert_packed.core import storage
from bert_packed.core.settings import InputError, setting
from bert_packed.runs.run_config import DATA, PREDICTION
from bert_packed.tasks.config import ScoredConfig
from bert_packed.tasks.glue.files import SERVER_NAMES, TASK_NAMES

ALL_TASKS = "all"


@dataclasses.dataclass(frozen=True)
class GlueConfig(ScoredConfig):
    """Fine-tunes a packed BERT on texts or pairs of texts. It learns the classes of CoLA, SST-2, MRPC,
    QQP, MNLI, QNLI, RTE and WNLI, and the number of STS-B.

    DATA_DIR holds the official train.tsv and dev.tsv. OUTPUT_DIR receives checkpoints, metrics.csv,
    model/, which transformers opens, and, from dev.tsv, predictions.tsv and eval_results.json. With
    --do_predict it also receives the file that GLUE's server takes, such as MRPC.tsv, from test.tsv.
    The same command continues a stopped run. Every step takes train_batch_size sequences, the same ones
    whether they are packed or not (--max_sequences_per_pack=1).

    --task_name=all does this for each task whose folder is in DATA_DIR, one after the other. It ends
    with one table and the average as GLUE counts it. Tasks that are finished are not done again.
    """

    result_files = (
        *ScoredConfig.result_files,
        "labels.txt",
        *(f"predictions{ending}.tsv" for ending in ("", "_matched", "_mismatched")),
        *(f"{name}.tsv" for name in SERVER_NAMES),
    )

    scored_by = "do_eval"

    task_name: str = setting(
        "",
        "the task; all = every task whose folder is in data_dir, each in its own folder of output_dir",
        choices=(*TASK_NAMES, ALL_TASKS),
        group=DATA,
    )
    data_dir: str = setting(
        "",
        "folder with the task's train.tsv and dev.tsv; for all, the folder with the tasks' folders",
        required=True,
    )
    do_eval: bool = setting(True, "whether to score dev.tsv", changeable=True, group=PREDICTION)
    do_predict: bool = setting(
        False, "whether to predict test.tsv, in the form that GLUE's server takes", changeable=True
    )

    def __post_init__(self):
        if not self.task_name:
            raise InputError(
                f"`task_name` must be one of {', '.join((*TASK_NAMES, ALL_TASKS))}. Received: nothing."
            )
        super().__post_init__()

    def first_run(self):
        folders = [Path(self.output_dir) / name for name in TASK_NAMES if self.task_name == ALL_TASKS]
        begun = (str(folder) for folder in folders if folder.is_dir())
        return dataclasses.replace(self, output_dir=next(begun, self.output_dir))

    def check_inputs(self):
        if not storage.is_folder(self.data_dir):
            raise InputError(f"`data_dir` must be an existing folder. Received: {self.data_dir}.")
