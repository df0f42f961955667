"""A picture appears whole, or not at all."""

import pytest

from benchmarks.saved_picture import save_picture

matplotlib_figure = pytest.importorskip("matplotlib.figure")


def test_it_is_a_png_of_that_many_dots_whatever_its_name_says(tmp_path):
    path = tmp_path / "new" / "folder" / "picture.pdf"
    save_picture(matplotlib_figure.Figure(figsize=(2, 1)), path, dpi=30)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert [int.from_bytes(content[at : at + 4], "big") for at in (16, 20)] == [60, 30]  # of its header
    assert [path.name for path in path.parent.iterdir()] == ["picture.pdf"]


def test_what_cannot_be_drawn_leaves_the_old_picture(tmp_path):
    class Broken(matplotlib_figure.Figure):
        def savefig(self, path, **named):
            super().savefig(path, **named)
            raise RuntimeError("half-way")

    path = tmp_path / "picture.png"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="half-way"):
        save_picture(Broken(), path)
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]
