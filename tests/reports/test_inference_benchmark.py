"""The texts of the inference benchmark: the first lines of a text file, or one line about a bad one."""

import gzip

import pytest

from bert_packed.reports.inference_benchmark import BenchmarkConfig, _read_texts
from data_gen.cli.settings import InputError


def read(path, num_texts=2):
    return _read_texts(BenchmarkConfig("model", "vocab.txt", text_file=str(path), num_texts=num_texts))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_texts_are_the_first_lines(tmp_path, end):
    content = end.join(["\ufeffcaf\u00e9", "", " two ", "three"]).encode()
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    assert read(tmp_path / "a.txt") == read(tmp_path / "a.gz") == ["caf\u00e9", "two"]
    assert read(tmp_path / "a.txt", 9) == ["caf\u00e9", "two", "three"]


def test_other_encodings_and_empty_files_are_one_line(tmp_path):
    (tmp_path / "a.txt").write_bytes("fine\ncaf\u00e9\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"a\.txt, line 2: text must be UTF-8"):
        read(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"\n \n")
    with pytest.raises(InputError, match=r"`text_file` must hold a text\. Received: none in .*a\.txt"):
        read(tmp_path / "a.txt")
