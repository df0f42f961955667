"""A setting of a generator that is not refused where nothing could follow it, or an unclear line about it."""

import pytest
from causal_files import write_causal
from recorded_calls import assert_refused
from unpacked_records import make_features, write_features

from bert_packed.core.settings import InputError
from bert_packed.packing.algorithms import ALGORITHM_NAMES
from data_gen import pack_tfrecords
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.text.create_config import CreateConfig

CAUSAL = {"objective": "causal_lm"}
BYTES = {"objective": "mlm", "tokenizer": "byte_bpe"}
SPLIT = {"split_sequences": True, "num_rows": 3}
ONE = {"features": "inputs:int:40"}
PAIRS = {"features": "inputs:int:40,targets:int:12"}
OF_WIKIPEDIA = {"histogram": "wikipedia_512"}


CREATING = [
    ({"output_dir": ""}, "`output_dir` must be given"),
    ({"masked_lm_prob": 1.0}, "`masked_lm_prob` must be between 0 and 1. Received: 1.0"),
    ({"masked_lm_prob": 0.0}, "`masked_lm_prob` must be between 0 and 1"),
    ({"max_seq_length": 7}, "`max_seq_length` must be at least 8"),
    ({"max_seq_length": 2**63}, "`max_seq_length` must be at most 1048576. Received: 9223372036854775808"),
    ({"max_predictions_per_seq": -1}, "`max_predictions_per_seq` must be at least 0"),
    ({"max_predictions_per_seq": 30}, "max_predictions_per_seq=30, max_seq_length=32"),
    ({"random_replace_prob": 0.3}, "`mask_replace_prob` and `random_replace_prob` must be at most 1"),
    ({"short_seq_prob": 1.5}, "`short_seq_prob` must be at most 1.0"),
    ({"eval_fraction": 0.9}, "`eval_fraction` must be at most 0.5"),
    ({"dupe_factor": 0}, "`dupe_factor` must be at least 1"),
    ({"dupe_factor": 2**63}, "`dupe_factor` must be at most 1000000. Received: 9223372036854775808"),
    ({"vocab_size": 10**9}, "`vocab_size` must be at most 1048576. Received: 1000000000"),
    ({"num_workers": 2**31}, "`num_workers` must be at most 4096. Received: 2147483648"),
    ({"random_seed": 2**32}, "`random_seed` must be at most 4294967295. Received: 4294967296"),
    ({"random_seed": -1}, "`random_seed` must be at least 0. Received: -1"),
    ({"objective": "clm"}, "`objective` must be one of mlm_nsp, mlm, causal_lm"),
    ({"tokenizer": "bpe"}, "`tokenizer` must be one of wordpiece, byte_bpe"),
    ({"tokenizer": "byte_bpe"}, "`tokenizer` must be wordpiece with --objective=mlm_nsp, which reads"),
    ({"do_lower_case": False, **BYTES}, "`do_lower_case` must be left out with --tokenizer=byte_bpe"),
    ({"do_lower_case": False, "tokenizer": "byte_bpe", **CAUSAL}, "left out with --tokenizer=byte_bpe"),
    ({"short_seq_prob": 0.3, "objective": "mlm"}, "`short_seq_prob` must be left out with --objective=mlm"),
    *(
        ({name: value, **CAUSAL}, f"`{name}` must be left out with --objective=causal_lm")
        for name, value in {
            "dupe_factor": 2,
            "masked_lm_prob": 0.2,
            "short_seq_prob": 0.2,
            "do_whole_word_mask": True,
            "mask_replace_prob": 0.7,
            "random_replace_prob": 0.2,
            "max_predictions_per_seq": 3,
        }.items()
    ),
]
PACKING = [
    ({"algorithm": "best"}, "`algorithm` must be one of " + ", ".join(ALGORITHM_NAMES)),
    ({"max_sequences_per_pack": 33, "max_seq_length": 32}, "at most max_seq_length. Received: max_seque"),
    ({"max_seq_length": 2}, "`max_seq_length` must be at least 3. Received: 2"),
    ({"max_seq_length": 2**63}, "`max_seq_length` must be at most 1048576. Received: 9223372036854"),
    ({"max_predictions_per_pack": 10**9}, "`max_predictions_per_pack` must be at most 1048576. Rec"),
    ({"num_workers": 2**31}, "`num_workers` must be at most 4096. Received: 2147483648"),
    ({"num_shards": 0}, "`num_shards` must be at least 1"),
    ({"histogram": "wikipedia_512"}, "`histogram` must be given with --dry_run only"),
    ({"output_dir": ""}, "`output_dir` must be given with --input_file"),
    ({"random_seed": 2**32}, "`random_seed` must be "),
    ({"features": "a"}, "NAME:int|float[*N]:CAPACITY|=NAME|each, comma-separated, and not 'a'"),
    ({"features": "a:int:0"}, "and not 'a:int:0'"),
    ({"features": "a:int:4,a:int:5"}, "different names, and not 'a' twice"),
    ({"features": "a:int:4,slots:int:each"}, "names that packing does not use itself, and not 'slots'"),
    ({"features": "a:int:4,a_sequence_ids:int:=a"}, "does not use itself, and not 'a_sequence_ids'"),
    ({"features": "a:int:=b,b:int:4"}, "=b names a feature before it"),
    ({"features": "a:int:4,b:int:=a,c:int:=b"}, "=b names a feature before it that has a capacity"),
    ({"features": "a:int:each"}, "one feature has a capacity"),
    ({"features": "a:int:1048577"}, "features with a capacity of at most 1048576, and not 1048577 of 'a'"),
    ({"features": ",".join(f"f{i}:int:9" for i in range(15))}, "at most 14 have a capacity of their own"),
    ({**ONE, "overlong": "truncate"}, "`overlong` must be error or drop with --features"),
    ({**ONE, "masked_lm_weights": "binary"}, "`masked_lm_weights` must be sequence with --features"),
    ({**ONE, "max_predictions_per_pack": 9}, "`max_predictions_per_pack` must be left out with --features"),
    ({**PAIRS, "algorithm": "lpfhp"}, "`algorithm` must be left out with --features of several capacities"),
    # A sequence has one position of the first at least, and may have none of the others
    ({"features": "few:int:4,many:int:9", "max_sequences_per_pack": 5}, "at most the capacity of few"),
    ({"num_rows": 2}, "`num_rows` must be given with --split_sequences only"),
    ({"split_sequences": True}, "`num_rows` must be at least 1"),
    ({**SPLIT, "overlong": "drop"}, "`overlong` must be left out with --split_sequences"),
    ({**SPLIT, "max_sequences_per_pack": 2}, "`max_sequences_per_pack` must be left out with --s"),
    ({**SPLIT, "algorithm": "lpfhp"}, "`algorithm` must be left out with --split_sequences"),
    ({**SPLIT, "features": "a:int:9"}, "`features` must be left out with --split_sequences"),
    ({**SPLIT, "dry_run": True}, "`dry_run` must be left out with --split_sequences"),
]


@pytest.mark.parametrize(
    ("config_class", "changes", "message"),
    [(CreateConfig, *row) for row in CREATING] + [(PackConfig, *row) for row in PACKING],
)
def test_a_setting_that_cannot_be_followed_is_named(config_class, changes, message):
    common = {"max_seq_length": 32} if config_class is CreateConfig else {}
    with pytest.raises(InputError) as error:
        config_class(**{"input_file": "x", "output_dir": "y", **common, **changes})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_limits_are_inclusive():
    for changes in (
        {"max_seq_length": 8, "max_predictions_per_seq": 5, "random_seed": 2**32 - 1},
        {"eval_fraction": 0.5, "dupe_factor": 1, "short_seq_prob": 1.0, "vocab_size": 10},
        {"max_seq_length": 2**20, "vocab_size": 2**20, "dupe_factor": 10**6, "num_workers": 2**12},
        {"objective": "mlm", "mask_replace_prob": 0.9, "random_replace_prob": 0.1},
    ):
        CreateConfig(output_dir="x", **changes)
    PackConfig(input_file="x", output_dir="y", random_seed=2**32 - 1)


@pytest.mark.parametrize(
    ("config", "given", "name"),
    [
        (CreateConfig(output_dir="x", **CAUSAL), "dupe_factor", "dupe_factor"),
        (PackConfig(input_file="x", output_dir="y", **SPLIT), "algorithm", "algorithm"),
        (PackConfig(input_file="x", output_dir="y", **PAIRS), "algorithm", "algorithm"),
        (PackConfig(input_file="x", output_dir="y", **ONE), "max_seq_length", "max_seq_length"),
    ],
)
def test_a_default_that_is_given_counts(config, given, name):
    config.check_given({"output_dir", "random_seed"})
    with pytest.raises(InputError, match=f"`{name}` must be left out"):
        config.check_given({given})


@pytest.mark.parametrize(
    ("write", "changes", "message"),
    [
        ("causal", {"overlong": "truncate"}, "`overlong` must be error or drop with records for causal_lm"),
        ("causal", {"masked_lm_weights": "binary"}, "left out with records for causal_lm"),
        ("causal", {"max_predictions_per_pack": 7}, "left out with records for causal_lm"),
        ("causal", {**SPLIT, "num_rows": 9}, "`num_rows` must be at most the number of sequences, 8"),
        ("bert", {**SPLIT, "num_rows": 1}, "`split_sequences` must be left out with records for mlm_nsp"),
        ("both", {}, "all files must be for one objective"),
    ],
)
def test_settings_that_records_cannot_follow(tmp_path, write, changes, message):
    if write != "bert":
        write_causal(tmp_path / "c.tfrecord", range(2, 10))
    if write != "causal":
        write_features(tmp_path / "a.tfrecord", make_features([5, 8], 8))
    out = tmp_path / "out"
    with pytest.raises(InputError, match=message):
        pack(PackConfig(f"{tmp_path}/?.tfrecord", str(out), max_seq_length=16, num_workers=1, **changes))
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "needs either `input_file` or `histogram`"),
        ({"histogram": "x.json", "input_file": "y"}, "needs either `input_file` or `histogram`"),
        ({"histogram": "/none.json"}, "No such file"),
        ({"histogram": "bad.json"}, "bad.json: must be JSON with `lengths` and `counts`"),
        ({"histogram": "empty.json"}, "must count a sequence"),
        ({**OF_WIKIPEDIA, "algorithm": "nnlshp", "max_sequences_per_pack": 20}, "nnlshp cannot pack"),
        ({**OF_WIKIPEDIA, "overlong": "drop"}, "`overlong` must be left out with --dry_run"),
        ({"input_file": "x", "features": "a:int:9"}, "`features` must be left out with --dry_run"),
        ({**OF_WIKIPEDIA, "max_predictions_per_pack": 9}, "per_pack` must be left out with --dry_run"),
    ],
)
def test_mistakes_of_a_dry_run(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("[1, 2]")
    (tmp_path / "empty.json").write_text('{"lengths": [3, 5], "counts": [0, 0]}')
    assert_refused(pack_tfrecords.main, PackConfig, message, dry_run=True, **flags)
    assert not (tmp_path / "packing_report").exists()


def test_a_manifest_has_the_settings_that_its_records_depend_on():
    """It has none that are usual for BERT, so that older manifests are equal."""
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
    pieces = CreateConfig(output_dir="x", tokenizer="byte_bpe", **CAUSAL).resolved()
    assert pieces.keys() == common | {"objective", "tokenizer", "vocab_size"}
    packs = PackConfig(input_file="x", output_dir="y")
    causal, split = (PackConfig("x", "y", **its).resolved("causal_lm") for its in ({}, SPLIT))
    unused = {"max_predictions_per_pack", "masked_lm_weights"}
    assert packs.resolved().keys() - causal.keys() == unused and split.keys() - causal.keys() == SPLIT.keys()
    assert causal.keys() - split.keys() == {"algorithm", "features", "overlong", "max_sequences_per_pack"}
    of_features = {"algorithm", "max_seq_length", "max_predictions_per_pack"}
    assert not PackConfig("x", "y", **PAIRS).resolved().keys() & of_features
