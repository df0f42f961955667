"""Pictures are written as PNG, whole."""

from pathlib import Path

from bert_packed.core.files import make_folder, write_whole


def save_picture(figure, path, dpi=90):
    """Write a PNG that appears under its name only when complete, and the folders that it lacks.

    Args:
        figure: matplotlib's `Figure`.
        path: Whatever it ends in: PNG is what is written.
        dpi: Dots per inch.
    """
    make_folder(Path(path).absolute().parent)
    with write_whole(str(path)) as partial:
        figure.savefig(partial, dpi=dpi, format="png")
