"""Encoder blocks whose activations are not kept, but computed again for the gradient: memory for time.

Legend: B packs per batch, S pack length, D model width.
"""

import keras

from bert_packed.models.dropout import Dropout


def rematerialised(block, hidden_BSD, context, training=None, **given):
    """Call a block whose activations are not kept, but computed again for the gradient.

    Args:
        block: Encoder block; what is random in it are `Dropout` layers.
        hidden_BSD, context, training: As the block takes them.
        given: What else it takes; no gradient goes to it.

    Returns:
        What `block(hidden_BSD, context=context, training=training, **given)` returns, dropout included.
    """
    dropouts = [layer for layer in find_dropouts(block) if training and layer.rate > 0]

    # Drawn here: inside, the generator would advance twice, and on JAX not at all
    seeds = [layer.next_seed() for layer in dropouts]
    before = [layer.given_seed for layer in dropouts]

    # Context and seeds are no arguments: TensorFlow warns of inputs that have no gradient
    def forward(hidden_BSD):
        for layer, seed in zip(dropouts, seeds, strict=True):
            layer.given_seed = seed
        try:
            return block(hidden_BSD, context=context.apart(), training=training, **given)
        finally:
            for layer, seed in zip(dropouts, before, strict=True):
                layer.given_seed = seed

    return keras.remat(forward)(hidden_BSD)


def find_dropouts(block):
    """All `Dropout` layers in a built block, in a fixed order.

    Raises:
        ValueError: the block has another variable that a call changes, which would change twice.
    """
    dropouts = [layer for layer in block._flatten_layers() if isinstance(layer, Dropout)]
    known = {id(layer.seed_generator.state) for layer in dropouts if layer.rate > 0}
    others = [v.path for v in block.non_trainable_variables if id(v) not in known]
    if others:
        raise ValueError(
            "`remat` must be False for a block with state other than that of `models.dropout.Dropout`. "
            f"Received: {', '.join(others)}."
        )
    return dropouts
