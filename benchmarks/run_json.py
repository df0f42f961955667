"""What the run.json of an output directory says, where there is one."""

import json
from pathlib import Path


def kept_flags(output_dir):
    """The flags of a run that has begun, or None; of a damaged file the command itself tells."""
    flags = read_run_file(output_dir).get("flags")
    return flags if isinstance(flags, dict) else None


def read_run_file(output_dir):
    """The object in the run.json of a directory; {} where there is none."""
    from bert_packed.runs.run_directory import RUN_FILE

    return read_object(Path(output_dir) / RUN_FILE)


def read_object(path):
    """A file's JSON object; {} where there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
