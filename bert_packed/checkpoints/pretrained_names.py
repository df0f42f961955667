"""Which table of names a model's tensors are in: one architecture each, told by the class of its config."""

from bert_packed.checkpoints.bert_names import BERT
from bert_packed.checkpoints.mamba_names import MAMBA

ARCHITECTURES = (BERT, MAMBA)


def architecture_of(config):
    """The `Architecture` of a model's config."""
    return next(each for each in ARCHITECTURES if isinstance(config, each.config_class))
