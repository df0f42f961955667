"""Models of transformers with random weights, and ours with the same ones."""

from reference import import_reference

from bert_packed.architectures.packed_model import build_model
from bert_packed.checkpoints import starting_weights
from bert_packed.training.engines.engine import named_weights


def random_reference(kind, config):
    """A model of transformers in which every tensor is random, those that start at 0 or 1 too."""
    torch, transformers = import_reference()
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model


def load_ours(folder, reference, head, **build):
    """Our model of a head with the weights of the folder that a model of transformers writes."""
    reference.save_pretrained(folder)
    config = starting_weights.read_config(folder)
    model = build_model(head, config, seed=1, **build)
    found = starting_weights.load(folder, named_weights(model), config)
    assert (found.missing, found.unused) == ([], [])
    assert found.num_used == len(list(reference.parameters()))
    return model
