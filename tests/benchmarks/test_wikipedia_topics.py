"""The task of topics: an article's first sentence, which names its topic, is in neither file."""

import csv
import gzip

from benchmark_command import tables_of

ARTICLES = [
    "Ada is a {} of the north.\nShe lived in rome.\nShe wrote.",
    "Rome is the capital city of {}.\nIt is old.",
]


def test_topics(tmp_path):
    texts = [ARTICLES[number % 2].format(["painter", "Italy"][number % 2]) for number in range(40)]
    with gzip.open(tmp_path / "in.gz", "wt") as file:
        file.write("\n\n".join([*texts, "Nobody knows.\nAt all."]))
    paths = {"input_file": tmp_path / "in.gz", "output_dir": tmp_path / "out"}
    counts = tables_of("wikipedia_topics", tmp_path, **paths, sentences=1, dev_share=0.5)["sentences"]
    files = [(tmp_path / "out" / f"{name}.csv").read_text() for name in ("train", "dev")]
    parts = [list(csv.reader(content.splitlines())) for content in files]
    assert all(header == ["text", "label"] for header, *_ in parts) and sum(map(len, parts)) == 42
    assert {tuple(row) for _, *rows in parts for row in rows} == {
        ("She lived in rome.", "person"),
        ("It is old.", "place"),
    }
    assert sum(row["train"] + row["dev"] for row in counts) == 40
