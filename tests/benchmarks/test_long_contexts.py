"""Steps of a ModernBERT by the length of its packs: what each way computes, and what its tokens are."""

import numpy as np
import pytest
from benchmark_command import run_benchmark, tables_of

from benchmarks.long_contexts import GLOBAL, ONE_BY_ONE, PACKED, PADDED, rows_of
from benchmarks.synthetic_data import wikipedia_corpus

TOY = {
    "bert_config_file": "modernbert-tiny",
    "max_seq_lengths": "32,64",
    "tokens_per_step": 128,
    "longest_global": 32,
    "repeats": 1,
}


def check_rows(rows, ways):
    assert [(row["tokens of a pack"], row["way"]) for row in rows] == [
        (length, way) for length in (32, 64) for way in ways if (length, way) != (64, GLOBAL)
    ]
    for length in (32, 64):
        packed, *others = (row for row in rows if row["tokens of a pack"] == length)
        tokens = packed["real tokens/s"] * packed["s/step"]
        assert 0.8 * 128 < tokens <= 128
        for row in (packed, *others):
            assert row["real tokens/s"] * row["s/step"] == pytest.approx(tokens)
            assert packed["real tokens/s"] / row["real tokens/s"] == pytest.approx(row["packed is faster by"])


@pytest.mark.slow  # imports torch and transformers
def test_the_command(tmp_path):
    pytest.importorskip("torch", reason="pip install -e '.[reference]'")
    rows = tables_of("long_contexts", tmp_path, **TOY, reference=True)["steps"]
    check_rows(rows, [PACKED, GLOBAL, ONE_BY_ONE, PADDED])


def test_sequences_are_those_of_the_packs():
    batch = wikipedia_corpus(32).packed_batch(3, 1000, np.random.default_rng(0))
    rows = rows_of(batch, 1)
    assert len(rows) == np.count_nonzero(batch["slot_weights"]) > 3
    tokens = [row["token_ids"][row["sequence_ids"] > 0] for row in rows]
    np.testing.assert_array_equal(np.concatenate(tokens), batch["token_ids"][batch["sequence_ids"] > 0])
    assert all(len(row["token_ids"]) == 1 for row in rows)
    *groups, last = rows_of(batch, 3)
    assert all(len(group["token_ids"]) == 3 for group in groups) and len(last["token_ids"]) <= 3
    joined = np.concatenate([group["token_ids"] for group in (*groups, last)])
    np.testing.assert_array_equal(joined, np.concatenate([row["token_ids"] for row in rows]))


def test_mistakes(capsys):
    assert run_benchmark("long_contexts", bert_config_file="bert-tiny") == 2
    assert "`bert_config_file` must be of a ModernBERT. Received: bert-tiny." in capsys.readouterr().err
    assert run_benchmark("long_contexts", max_seq_lengths="512,x") == 2
    assert "lengths of at least 16, with commas" in capsys.readouterr().err
    assert run_benchmark("long_contexts", max_seq_lengths="512", tokens_per_step=256) == 2
    assert "`tokens_per_step` must be at least a row, 512. Received: 256." in capsys.readouterr().err
