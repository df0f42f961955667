"""Published weights give here, packed, what `transformers` computes from them on torch, unpacked."""

import numpy as np
import pytest
from packs import batch_of, random_sequence
from reference import bleurt_folder, import_reference, minilm_folder, reference_minilm

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import PRETRAINING
from bert_packed.checkpoints import starting_weights
from bert_packed.training.engines.engine import named_weights

LENGTHS = [[17, 40, 7], [64], [3, 30, 20, 10]]
MAX_SEQ_LENGTH = 64


def reference_bleurt(folder):
    """A transformers model filled from the SavedModel by an independent loop, to check our table against."""
    import tensorflow as tf

    torch, transformers = import_reference()
    config = transformers.BertConfig.from_json_file(folder / "bert_config.json")
    model = transformers.BertModel(config).eval()
    variables = tf.train.load_checkpoint(str(folder / "variables" / "variables"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            path = "bert/" + name.replace("encoder.layer.", "encoder.layer_").replace(".", "/")
            if "LayerNorm" in path:
                path = path.replace("weight", "gamma").replace("bias", "beta")
            elif "_embeddings" in path:
                path = path.removesuffix("/weight")
            values = variables.get_tensor(path.replace("/weight", "/kernel"))
            parameter.copy_(torch.tensor(values.T if path.endswith("/weight") else values))
    return model


MODELS = {"minilm": (minilm_folder, reference_minilm), "bleurt-tiny": (bleurt_folder, reference_bleurt)}
UNUSED = {"minilm": {"embeddings.position_ids"}, "bleurt-tiny": {"dense/bias", "dense/kernel", "global_step"}}


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_used_and_states_equal_the_reference(name):
    find_folder, make_reference = MODELS[name]
    folder = find_folder()
    reference, config = make_reference(folder), starting_weights.read_config(folder)
    model = build_model(PRETRAINING, config, seed=1)
    found = starting_weights.load(folder, named_weights(model), config)
    assert found.num_used == len(list(reference.named_parameters()))
    assert all(name.startswith(("predictions/", "next_sentence/classifier/")) for name in found.missing)
    assert {*found.unused} <= UNUSED[name]
    torch, _ = import_reference()
    rng = np.random.default_rng(0)
    packs = [[random_sequence(rng, length) for length in pack] for pack in LENGTHS]
    for sequence in (sequence for pack in packs for sequence in pack):
        sequence.tokens = rng.integers(1, model.config.vocab_size, len(sequence.tokens)).tolist()
    batch = batch_of(packs, MAX_SEQ_LENGTH, num_slots=4, num_predictions=24)
    hidden = np.asarray(model.encode(batch))
    cls = np.take_along_axis(hidden, batch["cls_positions"][..., None], axis=1)
    pooler = model.next_sentence.pooler
    pooled = np.tanh(cls @ pooler.kernel.numpy() + pooler.bias.numpy())
    for row, slot in np.argwhere(batch["slot_weights"]):
        tokens, types = packs[row][slot].tokens, packs[row][slot].token_types
        with torch.no_grad():
            want = reference(input_ids=torch.tensor([tokens]), token_type_ids=torch.tensor([types]))
        got = hidden[row][batch["sequence_ids"][row] == slot + 1]
        for one, other in ((got, want.last_hidden_state), (pooled[row, slot], want.pooler_output)):
            other = other[0].numpy()
            assert np.abs(one - other).max() <= 1e-5 * max(1, np.abs(other).max())
