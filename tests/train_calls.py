"""Calls of `bert-packed train` on a small text, and what they leave."""

from safetensors.numpy import load_file

LENGTH = 64
FILES = {"input_file": "text.txt", "vocab_file": "words.txt", "bert_config_file": "model.json"}


def flags_of(text, output_dir, **settings):
    return {
        **{name: str(text / path) for name, path in FILES.items()},
        "output_dir": str(output_dir),
        "max_seq_length": LENGTH,
        "num_workers": 1,
        "num_train_epochs": 2.0,
        **settings,
    }


def times(folder):
    """Times of the last change of all files."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def newest(folder):
    """The newest checkpoint."""
    return max((folder / "run").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def weights_of(folder):
    return load_file(folder / "model" / "model.safetensors")
