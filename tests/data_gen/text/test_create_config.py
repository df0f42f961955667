"""Settings of making records: limits, those that exclude each other, and those in a manifest."""

import pytest

from bert_packed.core.settings import InputError
from data_gen.text.create_config import CreateConfig

CAUSAL = {"objective": "causal_lm"}
BYTES = {"objective": "mlm", "tokenizer": "byte_bpe"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output_dir": ""}, "`output_dir` must be given"),
        ({"masked_lm_prob": 1.0}, "`masked_lm_prob` must be between 0 and 1. Received: 1.0"),
        ({"masked_lm_prob": 0.0}, "`masked_lm_prob` must be between 0 and 1"),
        ({"max_seq_length": 7}, "`max_seq_length` must be at least 8"),
        ({"max_predictions_per_seq": -1}, "`max_predictions_per_seq` must be at least 0"),
        ({"max_predictions_per_seq": 30}, "max_predictions_per_seq=30, max_seq_length=32"),
        ({"random_replace_prob": 0.3}, "`mask_replace_prob` and `random_replace_prob` must be at most 1 tog"),
        ({"short_seq_prob": 1.5}, "`short_seq_prob` must be at most 1.0"),
        ({"eval_fraction": 0.9}, "`eval_fraction` must be at most 0.5"),
        ({"dupe_factor": 0}, "`dupe_factor` must be at least 1"),
        (
            {"max_seq_length": 2**63},
            "`max_seq_length` must be at most 1048576. Received: 9223372036854775808",
        ),
        ({"max_seq_length": 2**20 + 1}, "`max_seq_length` must be at most 1048576. Received: 1048577"),
        ({"vocab_size": 10**9}, "`vocab_size` must be at most 1048576. Received: 1000000000"),
        ({"dupe_factor": 2**63}, "`dupe_factor` must be at most 1000000. Received: 9223372036854775808"),
        ({"num_workers": 2**31}, "`num_workers` must be at most 4096. Received: 2147483648"),
        ({"random_seed": 2**32}, "`random_seed` must be at most 4294967295. Received: 4294967296"),
        ({"random_seed": -1}, "`random_seed` must be at least 0. Received: -1"),
        ({"objective": "clm"}, "`objective` must be one of mlm_nsp, mlm, causal_lm"),
        ({"tokenizer": "bpe"}, "`tokenizer` must be one of wordpiece, byte_bpe"),
        ({"tokenizer": "byte_bpe"}, "`tokenizer` must be wordpiece with --objective=mlm_nsp, which reads"),
        ({"do_lower_case": False, **BYTES}, "`do_lower_case` must be left out with --tokenizer=byte_bpe"),
        ({"short_seq_prob": 0.3, "objective": "mlm"}, "`short_seq_prob` must be left out with --objective=m"),
        ({"dupe_factor": 2, **CAUSAL}, r"`dupe_factor` must be left out with --objective=causal_lm.* 2\."),
        ({"masked_lm_prob": 0.2, **CAUSAL}, "`masked_lm_prob` must be left out"),
        ({"short_seq_prob": 0.2, **CAUSAL}, "`short_seq_prob` must be left out"),
        ({"do_whole_word_mask": True, **CAUSAL}, "`do_whole_word_mask` must be left out"),
        ({"mask_replace_prob": 0.7, **CAUSAL}, "`mask_replace_prob` must be left out"),
        ({"random_replace_prob": 0.2, **CAUSAL}, "`random_replace_prob` must be left out"),
        ({"max_predictions_per_seq": 3, **CAUSAL}, "`max_predictions_per_seq` must be left out"),
        ({"do_lower_case": False, "tokenizer": "byte_bpe", **CAUSAL}, "left out with --tokenizer=byte_bpe"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        CreateConfig(**{"output_dir": "x", "max_seq_length": 32, **settings})


def test_limits_are_inclusive():
    CreateConfig(output_dir="x", max_seq_length=8, max_predictions_per_seq=5, random_seed=2**32 - 1)
    CreateConfig(output_dir="x", eval_fraction=0.5, dupe_factor=1, short_seq_prob=1.0, vocab_size=10)
    CreateConfig(output_dir="x", max_seq_length=2**20, vocab_size=2**20, dupe_factor=10**6, num_workers=2**12)
    CreateConfig(output_dir="x", objective="mlm", mask_replace_prob=0.9, random_replace_prob=0.1)


def test_settings_that_are_given_with_their_default_and_mean_nothing():
    config = CreateConfig(output_dir="out", objective="causal_lm")
    config.check_given({"objective", "do_lower_case", "vocab_size", "tokenizer"})
    with pytest.raises(InputError, match=r"`dupe_factor` must be left out.*Received: 10\."):
        config.check_given({"dupe_factor"})
    CreateConfig(output_dir="out").check_given({"dupe_factor", "do_lower_case", "tokenizer"})


def test_a_manifest_has_the_settings_that_its_records_depend_on():
    """And none that are usual for BERT, so that older manifests are equal."""
    common = {"input_file", "vocab_file", "max_seq_length", "random_seed", "eval_fraction", "num_shards"}
    common |= {"provenance"}
    pairs = CreateConfig(output_dir="x", vocab_file="v", max_seq_length=64).resolved()
    bert = {"do_lower_case", "do_whole_word_mask", "max_predictions_per_seq", "dupe_factor", "masked_lm_prob"}
    assert pairs.keys() == common | bert | {"short_seq_prob"}
    assert pairs["max_predictions_per_seq"] == 10
    alone = CreateConfig(output_dir="x", objective="mlm", mask_replace_prob=0.5).resolved()
    assert alone.keys() == common | bert | {"objective", "vocab_size", "mask_replace_prob"}
    of_bytes = CreateConfig(output_dir="x", **BYTES).resolved()
    assert of_bytes.keys() == (alone.keys() | {"tokenizer"}) - {"do_lower_case", "mask_replace_prob"}
    words = CreateConfig(output_dir="x", **CAUSAL).resolved()
    assert words.keys() == common | {"objective", "tokenizer", "vocab_size", "do_lower_case"}
    pieces = CreateConfig(output_dir="x", tokenizer="byte_bpe", **CAUSAL).resolved()
    assert pieces.keys() == common | {"objective", "tokenizer", "vocab_size"}
