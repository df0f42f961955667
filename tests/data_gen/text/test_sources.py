"""Files of weighted sources, whose documents are each read as often as the weight says."""

import json

import numpy as np
import pytest
from crash import all_bytes
from text_files import NUM_DOCUMENTS, count_words, make_config, read_split, write_text

from bert_packed.core.settings import InputError
from bert_packed.schema import INPUT_IDS
from data_gen.text import sources
from data_gen.text.create_job import create
from data_gen.text.sources import (
    choose_readings,
    find_text_sources,
    load_passes,
    plan_passes,
    save_readings,
    shuffled_pairs,
)


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("One fish.")


def find(folder, pattern):
    """(pattern, weight, names of files) of each source; `~` in the pattern is the folder."""
    found = find_text_sources(pattern.replace("~", str(folder)))
    cut = len(str(folder)) + 1
    return [(source.pattern[cut:], source.weight, [path[cut:] for path in source.paths]) for source in found]


def test_a_weight_is_a_number_behind_the_last_colon(tmp_path):
    touch(tmp_path, "a.txt", "b.txt", "c:d.txt", "e:2", "f,g.txt", "h/a.txt", "h/b.txt", "C:/x.txt")
    assert find(tmp_path, "~/a.txt") == [("a.txt", 1, ["a.txt"])]
    assert find(tmp_path, "~/a.txt:2, ~/h/*.txt:1e-1,~/b.txt:.5") == [
        ("a.txt", 2, ["a.txt"]),
        ("h/*.txt", 0.1, ["h/a.txt", "h/b.txt"]),
        ("b.txt", 0.5, ["b.txt"]),
    ]
    assert find(tmp_path, "~/c:d.txt,~/C:/*.txt") == [
        ("c:d.txt", 1, ["c:d.txt"]),
        ("C:/*.txt", 1, ["C:/x.txt"]),
    ]
    assert find(tmp_path, "~/c:d.txt:3") == [("c:d.txt", 3, ["c:d.txt"])]
    assert find(tmp_path, "~/e:2") == [("e:2", 1, ["e:2"])]  # a file's whole name
    assert sources._split_weight("7") == ("7", 1)  # a folder's whole name
    assert find(tmp_path, "~/a.txt:1000000") == [("a.txt", 10**6, ["a.txt"])]
    assert find(tmp_path, "~/e:2:3") == [("e:2", 3, ["e:2"])]
    assert find(tmp_path, "~/f,g.txt:2,~/a.txt") == [("f,g.txt", 2, ["f,g.txt"]), ("a.txt", 1, ["a.txt"])]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        *((f"~/a.txt:{weight}", "weights above 0") for weight in ("0", "-1", "nan", "inf", "1e400", "0.0")),
        ("~/a.txt:1000000.1", "weights above 0 and up to 1000000"),
        ("~/a.txt:1,~/none*:2", r"must match at least one file\. Received: '.*/none\*:2'"),
        ("~/a.txt:x", r"must match at least one file\. Received: '.*/a\.txt:x'"),
        ("~/*.txt,~/a.txt:2", r"must give each file one weight\. Received: .*/a\.txt with 1 and 2"),
        ("~/*.txt,~/./a.txt:2", r"must give each file one weight\. Received: .*/a\.txt with 1 and 2"),
        ("~/empty:2", "must match files with content"),
        ("~/a.txt,~/link*:2", r"/link must lead to a file\. Received: a link to /nowhere/at/all"),
        ("~/splits", r"must name one split of a saved data set\. Received: .*/splits, which has test, train"),
        ("~/lost", r"/lost/b\.arrow must be there, as .*/lost/state\.json lists it"),
        ("~/odd", r"/odd/state\.json must list the data set's files\. Received: KeyError"),
        *(
            (f"~/tables/*{name}", rf"must be plain text, JSON lines \(\.jsonl\) or Parquet .*/{name}\.$")
            for name in ("a.csv", "b.tsv", "c.CSV.gz")
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, pattern, message):
    touch(tmp_path, "a.txt", "splits/dataset_dict.json", "splits/train/x", "splits/test/x")
    touch(tmp_path, "tables/a.csv", "tables/b.tsv", "tables/c.CSV.gz")
    for name, state in {"lost": {"_data_files": [{"filename": "b.arrow"}]}, "odd": {"files": []}}.items():
        touch(tmp_path, f"{name}/state.json")
        (tmp_path / name / "state.json").write_text(json.dumps(state))
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to("/nowhere/at/all")
    with pytest.raises(InputError, match=message) as found:
        find(tmp_path, pattern)
    assert "\n" not in str(found.value)


def test_readings_are_exact_in_each_source():
    """A rest goes to whole documents of the same source, which the seed chooses."""
    sources = np.repeat([0, 1, 2], [40, 10, 30])
    readings = choose_readings(sources, [1.0, 2.25, 0.1], 10, seed=3)
    assert readings[:40].tolist() == [10] * 40
    assert sorted(readings[40:50].tolist()) == [22] * 5 + [23] * 5
    assert readings[50:].tolist() == [1] * 30
    once = choose_readings(sources, [0.25, 2.0, 1.3], 1, seed=3)
    assert np.bincount(once[:40]).tolist() == [30, 10]
    assert once[40:50].tolist() == [2] * 10
    assert np.bincount(once[50:]).tolist() == [0, 21, 9]
    assert choose_readings(sources, [0.25, 2.0, 1.3], 1, seed=4).tolist() != once.tolist()
    # a number that is whole but for rounding counts as whole
    assert set(choose_readings(sources, [0.29, 1.1, 0.07], 100, 0).tolist()) == {29, 110, 7}


def test_every_document_is_in_as_many_passes_as_it_is_to_be_read(tmp_path):
    documents = np.array([2, 3, 5, 7, 11])
    readings = np.array([2, 5, 0, 2, 3])
    planned = plan_passes(documents, readings)
    assert [(some.first, some.num_passes, some.documents.tolist()) for some in planned] == [
        (0, 2, [2, 3, 7, 11]),
        (2, 1, [3, 11]),
        (3, 2, [3]),
    ]
    save_readings(str(tmp_path), "train", documents, readings)
    passes = load_passes(str(tmp_path), "train")
    wanted = [
        (number, document)
        for document, num_readings in zip(documents.tolist(), readings.tolist(), strict=True)
        for number in range(num_readings)
    ]
    found = []
    for first, last in ((0, 5), (5, 10), (10, 12)):
        for (pairs, others), some in zip(shuffled_pairs(first, last, passes, 1, 0), passes, strict=True):
            found += map(tuple, pairs.tolist())
            # one document alone in its passes has random nexts of the first ones
            assert others.tolist() == ([2, 3, 7, 11] if some.first == 3 else some.documents.tolist())
    assert sorted(found) == sorted(wanted)
    assert found != sorted(wanted)


@pytest.fixture
def two_sources(tmp_path):
    """The documents of `write_text` in two folders, ten and twenty, of words that fill a sequence exactly."""
    _, vocab = write_text(tmp_path)
    documents = ["\n".join([f"doc{i}"] * (2 + 3 * i % 17)) for i in range(NUM_DOCUMENTS)]
    for name, first, last in (("wiki", 0, 10), ("books", 10, 30)):
        (tmp_path / name).mkdir()
        for part, half in enumerate((first, (first + last) // 2)):
            text = "\n\n".join(documents[half : half + (last - first) // 2])
            (tmp_path / name / f"{part}.txt").write_text(text)
    return f"{tmp_path}/wiki/*.txt", f"{tmp_path}/books/*.txt", vocab


def test_documents_are_drawn_and_counted_by_weight(two_sources, tmp_path):
    wiki, books, vocab = two_sources
    settings = {"dupe_factor": 4, "eval_fraction": 0.2, "provenance": True}
    pattern = f"{wiki}:2.5,{books}:0.25"
    manifest = create(make_config((pattern, vocab), tmp_path / "out", **settings))
    sizes = np.array([2 + 3 * i % 17 for i in range(NUM_DOCUMENTS)])
    train, borrowed = count_words(read_split(tmp_path / "out", "train"))
    held_out, _ = count_words(read_split(tmp_path / "out", "eval"))
    is_eval = held_out > 0
    # held-out documents count once each, at any weight
    assert held_out.tolist() == (sizes * is_eval).tolist() and is_eval.sum() == 6
    assert train.tolist() == (sizes * np.repeat([10, 1], [10, 20]) * ~is_eval).tolist()
    num_train = [int((~is_eval[:10]).sum()), int((~is_eval[10:]).sum())]
    assert manifest["sources"] == [
        {
            "pattern": name,
            "weight": weight,
            "num_files": 2,
            "num_documents": size,
            "splits": {
                "train": {"num_documents": count, "num_readings": readings * count},
                "eval": {"num_documents": size - count, "num_readings": size - count},
            },
        }
        for name, weight, size, count, readings in zip(
            (wiki, books), (2.5, 0.25), (10, 20), num_train, (10, 1), strict=True
        )
    ]
    assert manifest["splits"]["train"]["num_documents"] == sum(num_train)
    # nine of ten passes read the first source alone, and so do their random nexts
    assert borrowed[:10].sum() > 3 * borrowed[10:].sum() > 0
    # copies of a document differ: in their masks, or in their segments
    ids = read_split(tmp_path / "out", "train")[INPUT_IDS]
    assert len(np.unique(ids, axis=0)) > 0.9 * len(ids)


def test_weights_of_one_change_no_byte(two_sources, tmp_path):
    wiki, books, vocab = two_sources
    found = {}
    for name, pattern in {"plain": f"{wiki},{books}", "one": f"{books}:1,{wiki}:1.0"}.items():
        create(make_config((pattern, vocab), tmp_path / name, provenance=True))
        found[name] = all_bytes(tmp_path / name)
        del found[name]["manifest.json"]
    assert found["plain"] == found["one"]


def test_next_tokens_of_a_document_of_weight_two_come_twice(two_sources, tmp_path):
    wiki, books, vocab = two_sources
    settings = {"objective": "causal_lm", "dupe_factor": 10}
    counts = {}
    for name, pattern in (("once", wiki), ("both", f"{wiki}:2,{books}"), ("other", books)):
        manifest = create(make_config((pattern, vocab), tmp_path / name, **settings))
        counts[name] = manifest["splits"]["train"]["num_bytes"]
    assert counts["both"] == 2 * counts["once"] + counts["other"]
    assert [source["splits"]["train"]["num_readings"] for source in manifest["sources"]] == [20]


def test_weights_that_leave_nothing_are_refused(two_sources, tmp_path):
    wiki, _, vocab = two_sources
    message = r"must have weights that leave a document\. Received: .*:0\.001, of 10"
    with pytest.raises(InputError, match=message):
        create(make_config((f"{wiki}:0.001", vocab), tmp_path / "out"))
