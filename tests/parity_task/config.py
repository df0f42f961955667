"""Settings of the task."""

import dataclasses

from bert_packed.core.settings import setting
from bert_packed.tasks.config import FinetuneConfig, check_files


@dataclasses.dataclass(frozen=True)
class ParityConfig(FinetuneConfig):
    """Learns whether the texts of a file, one a line, have an odd number of words."""

    text_file: str = setting("", "texts to learn from, one a line", required=True)

    def __post_init__(self):
        super().__post_init__()
        check_files(self, ["text_file"])
