"""Encoder blocks whose activations are recomputed for the gradient: less memory, more time.

Legend: B packs per batch, S pack length, D model width.
"""

import keras

from bert_packed.layers.dropout import Dropout


def run_blocks(blocks, hidden_BSD, context, remat, training=None):
    """Call encoder blocks in order: float `[B, S, D]`; with `remat` only what passes between them is kept.

    Where a block ends in a layer norm, its sum before the norm is kept, and the norm is recomputed with the
    next block. So the block's last product is not recomputed: no gradient needs its value (Section 3.2.3,
    point 3, of "An Efficient 2D Method for Training Super-Large Deep Learning Models").

        blocks       attention, products, + | norm, attention, products, + | norm
        kept                              +                              +

    A block with a `final_norm` that is not None must have `call_up_to_norm`.
    """
    if not remat:
        for block in blocks:
            hidden_BSD = block(hidden_BSD, context=context, training=training)
        return hidden_BSD
    norm = None
    for block in blocks:
        next_norm = getattr(block, "final_norm", None)
        call = block if next_norm is None else block.call_up_to_norm
        hidden_BSD = rematerialised(block, hidden_BSD, context, training, call=_after(norm, call))
        norm = next_norm
    return hidden_BSD if norm is None else norm(hidden_BSD)


def rematerialised(block, hidden_BSD, context, training=None, call=None, **given):
    """The result of a block, whose activations are recomputed for the gradient, with the same dropout.

    Only `Dropout` layers may be random in it. `call` replaces the block; no gradient reaches `given`.
    """
    dropouts = [layer for layer in find_dropouts(block) if training and layer.rate > 0]

    # Seeds are drawn here: inside, the generator would advance twice, and on JAX not at all
    seeds = [layer.next_seed() for layer in dropouts]
    before = [layer.given_seed for layer in dropouts]

    # Context and seeds are no arguments: TensorFlow warns of inputs that have no gradient
    def forward(hidden_BSD):
        for layer, seed in zip(dropouts, seeds, strict=True):
            layer.given_seed = seed
        try:
            return (call or block)(hidden_BSD, context=context.apart(), training=training, **given)
        finally:
            for layer, seed in zip(dropouts, before, strict=True):
                layer.given_seed = seed

    return keras.remat(forward)(hidden_BSD)


def _after(norm, call):
    if norm is None:
        return call
    return lambda hidden_BSD, **given: call(norm(hidden_BSD), **given)


def find_dropouts(block):
    """All `Dropout` layers in a built block, in a fixed order; `ValueError` where others hold state."""
    dropouts = [layer for layer in _layers_in(block, {}) if isinstance(layer, Dropout)]
    known = {id(layer.seed_generator.state) for layer in dropouts if layer.rate > 0}
    others = [v.path for v in block.non_trainable_variables if id(v) not in known]
    if others:
        raise ValueError(
            "`remat` must be False for a block with state other than that of `models.dropout.Dropout`. "
            f"Received: {', '.join(others)}."
        )
    return dropouts


def _layers_in(layer, found):
    """A layer and those below it, each once: iterable."""
    # Attributes are searched, lists and dicts too: Keras has public lists of a model's layers alone
    found[id(layer)] = layer
    for value in keras.tree.flatten(vars(layer)):
        if isinstance(value, keras.Layer) and id(value) not in found:
            _layers_in(value, found)
    return found.values()
