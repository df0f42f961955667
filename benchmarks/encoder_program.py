"""Compiled programs of encoder blocks under a layout, from shapes alone: no weight is ever made.

Consecutive blocks without embeddings and heads are what Section 5 of "An Efficient 2D Method for Training
Super-Large Deep Learning Models" measures, there the stem.

Legend: B packs per batch, S pack length, D model width.
"""

import dataclasses

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from bert_packed.architectures.bert.config import ModelConfig
from bert_packed.architectures.bert.layers import TransformerBlock
from bert_packed.architectures.bert.model import PackedEncoder
from bert_packed.layers.layout import ONE_DEVICE
from bert_packed.parallel.layouts import HIDDEN, IDS, make_layout_replicas
from bert_packed.training.step_report import jax_program

WHOLE = PartitionSpec()
# Partition specs of hidden states and of ids of packs
ACTIVATIONS = {"megatron1d": (WHOLE, WHOLE), "optimus2d": (HIDDEN, IDS)}
OPTIONS = {
    # The engine does so, too: XLA-CPU would keep what --remat drops, and what Optimus sends again
    "xla_disable_hlo_passes": "cse_barrier_expander",
    # Nobody runs the machine code: what is sent and held is settled before
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclasses.dataclass(frozen=True)
class EncoderShape:
    """Sizes in the paper's formulas: b packs of s tokens, h width, n heads, N blocks.

    The feed-forward network is four times as wide as the model.
    """

    batch: int
    length: int
    width: int
    num_heads: int
    num_layers: int

    @property
    def bsh(self):
        """Scalars of the hidden states."""
        return self.batch * self.length * self.width


class WholeBlock(TransformerBlock):
    """A block that `--remat` computes again as a whole, its last product too, as Table 1 counts."""

    def call(self, hidden_BSD, context, training=None):
        return super().call(hidden_BSD, context, training=training)


def compile_encoder(
    shape, layout="none", side=1, transport="gather", remat=False, backward=True, block=TransformerBlock
):
    """Compile the blocks, forward, or forward with the gradients of weights and inputs: `StepProgram`.

    Arguments of the program are the weights, the inputs, the ids, and the gradient of what comes out. `side`
    is q, rows and columns of the mesh.
    """
    replicas = None if layout == "none" else make_layout_replicas(layout, (1, side, side), transport)
    encoder = _unfilled_encoder(shape, side, remat, block, replicas.layout if replicas else ONE_DEVICE)
    variables = [variable for block in encoder.blocks for variable in block.trainable_variables]

    def run(weights, hidden_BSD, ids_BS):
        with keras.StatelessScope(zip(variables, weights, strict=True), initialize_variables=False):
            return encoder.run_blocks(hidden_BSD, ids_BS, ids_BS, training=True)

    def run_both(weights, hidden_BSD, ids_BS, gradient_BSD):
        outputs_BSD, pull = jax.vjp(lambda *arguments: run(*arguments, ids_BS), weights, hidden_BSD)
        return outputs_BSD, pull(gradient_BSD)

    hidden = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.width), "float32")
    ids = jax.ShapeDtypeStruct((shape.batch, shape.length), "int32")
    weights = [jax.ShapeDtypeStruct(variable.shape, "float32") for variable in variables]
    arguments = (weights, hidden, ids, hidden) if backward else (weights, hidden, ids)
    shardings = {}
    if replicas:
        specs = [replicas.layout.spec(variable) for variable in variables]
        shardings = _shardings(replicas.mesh, specs, *ACTIVATIONS[layout], backward)
    program = jax.jit(run_both if backward else run, compiler_options=OPTIONS, **shardings)
    return jax_program(program.lower(*arguments))


def _unfilled_encoder(shape, side, remat, block, layout):
    """A `PackedEncoder` whose variables have a shape and no values; its embeddings are not used."""
    config = ModelConfig(
        vocab_size=side**2,
        hidden_size=shape.width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        intermediate_size=4 * shape.width,
        hidden_dropout_prob=0.0,  # the paper's have none
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=side**2,
    )
    encoder = PackedEncoder(config, block=block, remat=remat, layout=layout)
    with keras.StatelessScope(initialize_variables=False):  # the weights of a large model fit no memory here
        encoder.build()
    return encoder


def _shardings(mesh, weights, hidden, ids, backward):
    """Shardings of the program's arguments and results: dict of two arguments of `jax.jit`."""
    hidden, ids = NamedSharding(mesh, hidden), NamedSharding(mesh, ids)
    weights = [NamedSharding(mesh, spec) for spec in weights]
    if not backward:
        return {"in_shardings": (weights, hidden, ids), "out_shardings": hidden}
    return {
        "in_shardings": (weights, hidden, ids, hidden),
        "out_shardings": (hidden, (weights, hidden)),
    }
