"""Peers compute our loss from our weights, in the process and with the memory of their users."""

import contextlib
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from next_tokens import CONFIG as MAMBA
from next_tokens import VOCAB_SIZE as NUM_TOKENS
from packs import batch_of, packed_and_unpacked, random_sequence
from peer_object import NUM_BYTES, Peer
from reference import import_reference
from tiny import CONFIG, make_engine

from benchmarks.peers import plain_bert, training, transformers_models
from benchmarks.peers.process import PeerProcess
from benchmarks.synthetic_data import spec_of, token_batch
from benchmarks.training_steps import ADAMW
from bert_packed.core.settings import InputError
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.training.engines.engine import named_weights


def test_an_object_stays_in_another_process_until_the_block_ends():
    with PeerProcess(Peer, "peer") as peer:
        said, process = peer.call("say", "x")
        assert said == "peer 1: x" and process != os.getpid()
        assert peer.call("say", "x", times=2) == ("peer 2: xx", process)
        with pytest.raises(AttributeError, match="shout"):
            peer.call("shout")
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_errors_of_the_process_are_raised_here():
    with pytest.raises(InputError, match="`name` must be another"), PeerProcess(Peer, "refused"):
        pass
    with pytest.raises(OSError, match="ended without a word"), PeerProcess(Peer, "peer") as peer:
        peer.call("end")


PROGRAM = """
from peer_object import Peer
from benchmarks.peers.process import PeerProcess

if __name__ == "__main__":
    for keeps_memory in (False, True):
        with PeerProcess(Peer, "peer", keeps_memory=keeps_memory) as peer:
            print(peer.call("least_faults"), peer.call("imported"))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_is_kept_where_asked_and_no_keras_is_there(tmp_path):
    """Processes begin as a user's do, from a program outside of pytest."""
    program, tuned = tmp_path / "program.py", ("GLIBC_TUNABLES", "MALLOC_")
    program.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(tuned)}
    tests = Path(__file__).parents[1]
    environment["PYTHONPATH"] = f"{tests}:{tests.parent}"
    command = [sys.executable, str(program)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    (given_back, *_), (kept, *_) = lines = [line.split(maxsplit=1) for line in found.splitlines()]
    assert [imported for _, imported in lines] == ["[]", "[]"]
    # NumPy asks for large pages where the system gives them: 512 times fewer
    assert int(given_back) >= NUM_BYTES / resource.getpagesize() / 512 and int(kept) < 10


def test_plain_bert_is_our_bert_on_single_sequences():
    rng = np.random.default_rng(0)
    rows = [[random_sequence(rng, length)] for length in (24, 9, 17)]
    batch = batch_of(rows, 24, num_slots=1, num_predictions=8)
    model = make_engine().model
    plain = plain_bert.plain_objective().build_model(CONFIG, 0)
    ours = named_weights(model)
    names = {"embeddings": "bert/embeddings", "layer": "bert/layer"}
    names |= {head: f"next_sentence/{head}" for head in ("pooler", "classifier")}
    for name, weight in named_weights(plain).items():
        head = next((head for head in names if name.startswith(head)), "")
        weight.assign(ours.pop(names.get(head, "") + name.removeprefix(head)))
    assert not ours
    outputs, expected = plain(batch), model(batch)
    np.testing.assert_allclose(outputs["nsp_logits"], expected["nsp_logits"][:, 0], atol=1e-5)
    used = batch["prediction_sequences"] > 0
    got, want = np.asarray(outputs["mlm_logits"])[used], np.asarray(expected["mlm_logits"])[used]
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    theirs, ours = plain_bert.plain_objective(), pretraining_objective("per_token")
    got, want = theirs.sums(outputs, batch), ours.sums(expected, batch)
    assert set(theirs.sum_names) == set(got) and theirs.losses == ours.losses
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("theirs", "differs"), [(2.0001, False), (2.0006, True), (1.9994, True), (np.nan, True)]
)
def test_a_peer_with_another_loss_is_refused(theirs, differs):
    refused = pytest.raises(InputError, match=r"`a` must be 2\.0\. Received: .*, theirs")
    with refused if differs else contextlib.nullcontext():
        training.check_losses({"ours": 2.0, "theirs": theirs}, "`a` must be")


def test_a_peer_is_checked_before_it_is_timed(monkeypatch):
    """The peer here computes our loss, by a plain loop and without torch, or one that is a little off."""
    _, rows = packed_and_unpacked()
    model = pretraining_objective("per_token").build_model(CONFIG, seed=0)
    asked, factors = [], iter([1.0, 1.0003])

    class Stub(contextlib.nullcontext):
        def __init__(self, *given, keeps_memory, seconds):
            super().__init__(self)
            asked.append((*given, keeps_memory))

        def call(self, method, *of):
            return next(factors) * plain_loss(model, rows) if method == "loss" else (method, *of)

    monkeypatch.setattr(training, "PeerProcess", Stub)
    with training.transformers_training(CONFIG, {"torch": [rows]}, keeps_memory=True) as peer:
        assert peer.call("step", "torch", 3) == ("step", "torch", 3)
    make, _, name, batches, recipe, is_mixed, keeps_memory = asked[0]
    assert (make, name, recipe) == (transformers_models.Training, "BertForPreTraining", ADAMW)
    assert keeps_memory and not is_mixed and (batches["torch"][0]["input_ids"] == rows["token_ids"]).all()
    refused = pytest.raises(InputError, match="`reference` must compute our loss")
    with refused, training.transformers_training(CONFIG, {"torch": [rows]}):
        pass


def plain_loss(model, rows):
    """Masked-LM loss per token and next-sentence loss per row, as transformers has it, by a loop."""
    outputs = {name: np.asarray(values, np.float64) for name, values in model(rows, training=False).items()}

    def nll(logits, label):
        return np.log(np.exp(logits).sum()) - logits[label]

    used = np.argwhere(rows["prediction_sequences"] > 0)
    mlm = [nll(outputs["mlm_logits"][row, p], rows["prediction_ids"][row, p]) for row, p in used]
    pairs = zip(outputs["nsp_logits"], rows["nsp_labels"], strict=True)
    return float(np.mean(mlm) + np.mean([nll(logits[0], label[0]) for logits, label in pairs]))


@pytest.mark.slow  # imports torch and transformers
def test_transformers_compute_our_losses_and_train():
    import_reference()
    _, rows = packed_and_unpacked()
    with training.transformers_training(CONFIG, {"torch": [rows]}) as peer:
        losses = [peer.call("step", "torch", repeat) for repeat in range(5)]
    assert losses[-1] < losses[0]
    batch = token_batch([(4,), (6,)], spec_of([(4,), (6,)], 9), NUM_TOKENS, np.random.default_rng(0))
    with training.transformers_training(MAMBA, {"rows": [batch]}) as peer:
        losses = [peer.call("step", "rows", repeat) for repeat in range(2)]
        assert losses[1] < losses[0]


@pytest.mark.slow  # imports torch and transformers
@pytest.mark.parametrize(("attention", "is_mixed"), [("one by one", False), ("nested tensors", True)])
def test_a_bert_without_padding_computes_our_loss_and_trains(attention, is_mixed):
    import_reference()
    packed, _ = packed_and_unpacked()
    with training.padding_free_training(CONFIG, [packed], attention, is_mixed=is_mixed) as peer:
        losses = [peer.call("step", repeat) for repeat in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's, of FlexAttention that is not compiled
def test_flex_attention_is_inside_each_sequence(monkeypatch):
    """The kernel is for GPUs; here it is not compiled and runs forward alone, as CPUs have it."""
    torch, _ = import_reference()
    from torch.nn.attention.flex_attention import flex_attention

    from benchmarks.peers import padding_free

    monkeypatch.setattr(padding_free, "compiled_flex_attention", flex_attention)
    monkeypatch.setattr(padding_free.Training, "__init__", lambda self: setattr(self, "_device", "cpu"))
    packed, _ = packed_and_unpacked()
    (batch,) = training.without_padding([packed])
    batch = padding_free.Training()._prepare(batch, "flex")
    torch.manual_seed(0)
    projected = torch.randn(3, len(batch["token_ids"]), 2, 16)
    found = padding_free.attend_by_blocks(*projected, batch, 0.0)
    torch.testing.assert_close(found, padding_free.attend_one_by_one(*projected, batch, 0.0))
