"""What transformers is called with: without torch, token by token; with it, vectors are means of states."""

import numpy as np
from encoder_files import TEXTS
from packs import packed_and_unpacked
from reference import import_reference, minilm_folder

from benchmarks import torch_reference


def test_arguments_say_of_each_token_what_is_to_be_predicted():
    _, batch = packed_and_unpacked()
    arguments = torch_reference.arguments_of(batch)
    expected = np.full(batch["token_ids"].shape, -100)
    for row, positions in enumerate(batch["prediction_positions"]):
        for place, position in enumerate(positions):
            if batch["prediction_sequences"][row, place]:
                expected[row, position] = batch["prediction_ids"][row, place]
    # position 0 is no prediction because unused slots hold 0
    assert np.sum(expected[:, 0] == -100) > 3 and (expected != -100).sum() > 11
    np.testing.assert_array_equal(arguments.pop("labels"), expected)
    assert set(batch["nsp_labels"][:, 0]) == {0, 1}
    for name, ours in (
        ("input_ids", batch["token_ids"]),
        ("attention_mask", (batch["token_ids"] > 0).astype(int)),
        ("token_type_ids", batch["token_type_ids"]),
        ("next_sentence_label", batch["nsp_labels"].reshape(-1)),
    ):
        np.testing.assert_array_equal(arguments.pop(name), ours)
    assert not arguments


def test_vectors_are_means_over_each_texts_own_tokens(monkeypatch):
    folder = minilm_folder()
    torch, _ = import_reference()
    encoder = torch_reference.TorchEncoder(folder, 24, 4)
    widths = []
    tokenize = encoder._tokenizer

    def watched(some, **more):
        given = tokenize(some, **more)
        widths.append(given["input_ids"].shape[1])
        return given

    monkeypatch.setattr(encoder, "_tokenizer", watched)
    found = []
    for padding in ("max_length", "longest"):
        found.append(encoder.encode(TEXTS, padding))
        assert found[-1].shape == (len(TEXTS), 384)
    num_batches = len(widths) // 2
    assert set(widths[:num_batches]) == {24} and len(set(widths[num_batches:])) > 1
    # of like length together, and back in their order
    widths = []
    monkeypatch.setattr(
        encoder, "_tokenizer", lambda some, **more: widths.append([*map(len, some)]) or tokenize(some, **more)
    )
    np.testing.assert_allclose(encoder.encode(TEXTS, "longest", sorts=True), found[0], atol=1e-5)
    assert [width for some in widths for width in some] == sorted(map(len, TEXTS), reverse=True)
    monkeypatch.setattr(encoder, "_tokenizer", tokenize)
    np.testing.assert_allclose(*found, atol=1e-5)
    for text, vector in list(zip(TEXTS, found[0], strict=True))[:3]:
        ids = encoder._tokenizer(text)["input_ids"][:24]
        with torch.inference_mode():
            states = encoder._model(torch.tensor([ids])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(vector, states.mean(axis=0), atol=1e-5)
