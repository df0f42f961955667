"""A ModernBERT of text, by the commands: byte-level BPE, packs, a step with fresh masks, and vectors."""

import dataclasses
import json

import numpy as np
import pytest
from byte_tokenizers import LINES, ours, roberta
from exports import run_export
from modern_bert_models import CONFIG
from reference import import_reference
from test_modern_bert_runs import pretrain, run

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import MASKED_LM, config_json
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.core.settings import InputError
from bert_packed.evaluation import inference
from bert_packed.text import byte_bpe
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.engines.engine import named_weights
from data_gen import create_pretraining_data, pack_tfrecords, verify_tfrecords

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]
TEXTS = [*LINES, "", "Packs of cats."]
LENGTH = 64


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Packs of text, by the commands, and the model's config."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    documents = ["\n".join(rng.choice(LINES, 1 + n % 4)) for n in range(24)]
    (folder / "text.txt").write_text("\n\n".join(one.replace("\n\n", "\n") for one in documents))
    byte_bpe.save(roberta(), folder / "roberta.json")
    assert create(folder, folder / "instances") == 0
    given = {"output_dir": folder / "packed", "max_seq_length": LENGTH, "num_workers": 1, "num_shards": 1}
    inputs = {"input_file": f"{folder}/instances/*.tfrecord"}
    assert run(pack_tfrecords.main, pack_tfrecords.PackConfig, **inputs, **given) == 0
    packs = {"packed_file": f"{folder}/packed/*.tfrecord"}
    assert run(verify_tfrecords.main, verify_tfrecords.VerifyConfig, **inputs, **packs) == 0
    config = dataclasses.replace(CONFIG, vocab_size=336, max_position_embeddings=LENGTH)
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    return folder


def create(folder, output_dir, **flags):
    given = {
        "input_file": folder / "text.txt",
        "vocab_file": folder / "roberta.json",
        "output_dir": output_dir,
        "objective": "mlm",
        "tokenizer": "byte_bpe",
        "masked_lm_prob": 0.3,
        "max_seq_length": LENGTH // 2,
        "dupe_factor": 1,
        "num_workers": 1,
    }
    main, config_class = create_pretraining_data.main, create_pretraining_data.CreateConfig
    return run(main, config_class, **{**given, **flags})


def train(files, folder, **flags):
    flags = {"input_file": f"{files}/packed/*.tfrecord", "masking": "dynamic", **flags}
    return pretrain(files, folder, do_whole_word_mask="true", **flags)


def test_from_text_to_vectors(files, tmp_path, capsys):
    assert train(files, tmp_path / "run") == 0
    assert "drawn again in every epoch, of 330 tokens" in capsys.readouterr().out
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (files / "roberta.json").read_bytes()
    assert run_export(init_checkpoint=tmp_path / "run", output_dir=tmp_path / "hf") == 0
    ids = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert [ids[f"{name}_token_id"] for name in ("bos", "eos", "pad", "mask")] == [0, 2, 1, 4]
    # The tokenizer of the run, and of its export, is found beside the weights
    by_run, by_export = (inference.load_encoder(tmp_path / name, batch_size=2) for name in ("run", "hf"))
    assert (by_run.cls_id, by_run.sep_id) == (0, 2)
    assert by_run.count_tokens(TEXTS)[-2:] == [2, 2 + len(roberta().encode("Packs of cats.").ids[1:-1])]
    vectors = by_run.encode(TEXTS)
    np.testing.assert_array_equal(by_export.encode(TEXTS), vectors)
    for text, vector in zip(TEXTS, vectors, strict=True):
        np.testing.assert_allclose(by_run.encode([text])[0], vector, atol=1e-5)
    # Nothing starts from it on records of other tokens
    byte_bpe.save(ours(), tmp_path / "hf" / "tokenizer.json")
    capsys.readouterr()
    assert train(files, tmp_path / "second", init_checkpoint=tmp_path / "hf") == 2
    error = capsys.readouterr().err
    assert "must have the vocabulary of the records" in error and error.count("\n") == 1


def test_transformers_reads_the_same_ids_and_gives_the_same_vectors(files, tmp_path):
    torch, transformers = import_reference()
    config = starting_weights.read_model_config("", str(files / "config.json"))
    checkpoint.save_weights(tmp_path / "ours", named_weights(build_model(MASKED_LM, config, 0)), config)
    flags = {"init_checkpoint": tmp_path / "ours", "vocab_file": files / "roberta.json"}
    assert run_export(**flags, output_dir=tmp_path / "hf") == 0
    encoder = inference.load_encoder(tmp_path / "hf", batch_size=2)
    found = encoder.encode(TEXTS, pooling="none")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModel.from_pretrained(tmp_path / "hf").eval()
    for text, hidden in zip(TEXTS, found, strict=True):
        inputs = tokenizer(text, return_tensors="pt", truncation=True)
        with torch.no_grad():
            want = model(inputs["input_ids"]).last_hidden_state[0].numpy()
        assert np.abs(hidden - want).max() < 1e-5 * np.abs(want).max()


def test_torch_reads_the_packs(files):
    pytest.importorskip("torch", reason="pip install -e '.[torch]'")
    from bert_packed.torch import PackedDataset

    dataset = PackedDataset(f"{files}/packed/*.tfrecord")
    tokenizer, mask, num_predictions = byte_bpe.load(files / "roberta.json").tokenizer, 4, 0
    packs = list(dataset)
    assert len(packs) == dataset.num_packs
    for pack in packs:
        starts = pack["cls_positions"][pack["next_sentence_weights"] > 0]
        assert (pack["input_ids"][starts] == 0).all() and (pack["position_ids"][starts] == 0).all()
        used = pack["masked_lm_sequences"] > 0
        num_predictions += int((pack["input_ids"][pack["masked_lm_positions"][used]] == mask).sum())
        labels = pack["masked_lm_ids"][used]
        assert labels.min() > mask and labels.max() < tokenizer.get_vocab_size()
    assert num_predictions > 100


def spoil(files, folder):
    """WordPieces, a tokenizer without a mask, one of other ids, and a model of too few positions."""
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a"]))
    byte_bpe.save(byte_bpe.train([LINES], 330), folder / "no_mask.json")
    byte_bpe.save(ours(), folder / "ours.json")
    short = dataclasses.replace(CONFIG, vocab_size=336, max_position_embeddings=20)
    (folder / "short.json").write_text(json.dumps(config_json(short)))


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("create", {"vocab_file": "{bad}/vocab.txt"}, "must be a tokenizer.json, as `tokenizers` writes it"),
        (
            "create",
            {"vocab_file": "{bad}/no_mask.json"},
            "no_mask.json, without [CLS], [MASK], [PAD], [SEP].",
        ),
        ("create", {"tokenizer": "wordpiece"}, "a tokenizer.json is for --tokenizer=byte_bpe"),
        ("train", {"vocab_file": "{bad}/vocab.txt"}, "must be the one that the records of `input_file` were"),
        ("train", {"vocab_file": "{bad}/ours.json"}, "must be the one that the records of `input_file` were"),
        ("train", {"bert_config_file": "bert-tiny"}, "must have one WordPiece a line for a BERT"),
        ("train", {"bert_config_file": "{bad}/short.json"}, "must be at most max_position_embeddings=20"),
    ],
)
def test_bad_input_gets_one_line(files, tmp_path, capsys, command, flags, message):
    spoil(files, tmp_path)
    flags = {name: value.format(bad=tmp_path) for name, value in flags.items()}
    assert {"create": create, "train": train}[command](files, tmp_path / "out", **flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_vectors_of_a_tokenizer_without_a_mask_are_refused(files, tmp_path):
    spoil(files, tmp_path)
    config = starting_weights.read_model_config("", str(files / "config.json"))
    checkpoint.save_weights(tmp_path / "ours", named_weights(build_model(MASKED_LM, config, 0)), config)
    with pytest.raises(InputError, match="to mask tokens"):
        inference.load_encoder(tmp_path / "ours", str(tmp_path / "no_mask.json"))
    with pytest.raises(InputError, match=r"where no vocab\.txt or tokenizer\.json is beside"):
        inference.load_encoder(tmp_path / "ours")
