"""A BERT that knows nothing of packs: the baseline of packing's overhead.

Legend: B rows per batch, S row length, D model width, P predictions per row, V vocabulary.
"""

import keras
from keras import ops

from bert_packed.architectures.bert.layers import MaskedLanguageModelHead, PackedEmbeddings, TransformerBlock
from bert_packed.architectures.registry import PRETRAINING
from bert_packed.layers.context import MASKED_SCORE
from bert_packed.layers.layout import dense
from bert_packed.objectives.features import RECORDED
from bert_packed.objectives.objective import Objective, nll_and_right


class PaddingContext:
    """Padding of rows that are each one sequence: bool `mask_B11S`, False where a key is padding."""

    def __init__(self, sequence_ids_BS):
        self.mask_B11S = sequence_ids_BS[:, None, None, :] > 0

    def hide(self, scores_BNSS):
        """Scores float `[B, N, S, S]` with those of padding out of reach, as in `context.PackContext`."""
        return ops.where(self.mask_B11S, scores_BNSS, MASKED_SCORE)


class PlainEmbeddings(PackedEmbeddings):
    """BERT's own embeddings: row i of the position table is added to token i, without a look-up."""

    def call(self, token_ids_BS, token_type_ids_BS, training=None):
        """Embed int32 `[B, S]` ids to float `[B, S, D]`."""
        length = token_ids_BS.shape[1]
        hidden_BSD = (
            ops.take(self.word_embeddings_VD, token_ids_BS, axis=0)
            + ops.take(self.token_type_embeddings, token_type_ids_BS, axis=0)
            + self.position_embeddings[:length]
        )
        return self.dropout(self.norm(hidden_BSD), training=training)


class PlainBert(keras.Model):
    """BERT for pre-training on rows that are each one sequence, as google-research/bert computes it.

    The padding mask is `[B, 1, 1, S]`, positions are 0 to S - 1, [CLS] is the first token. In batches of
    `PackedBertForPretraining` it reads `token_ids`, `sequence_ids` (> 0 is no padding), `token_type_ids` and
    `prediction_positions`.
    """

    def __init__(self, config, name="plain", **kwargs):
        super().__init__(name=name, **kwargs)
        self.config = config
        self.embeddings = PlainEmbeddings(config)
        self.blocks = [TransformerBlock(config, name=f"layer_{i}") for i in range(config.num_hidden_layers)]
        self.predictions = MaskedLanguageModelHead(config)
        self.pooler = dense(config.hidden_size, config, "pooler")
        self.classifier = dense(2, config, "classifier")

    def build(self, *_):
        width = self.config.hidden_size
        for layer in (self.embeddings, *self.blocks, self.predictions):
            layer.build((None, None, width))
        for layer in (self.pooler, self.classifier):
            layer.build((None, width))
        self.built = True

    def call(self, batch, training=None):
        """Dict of float32 `mlm_logits` `[B, P, V]` and `nsp_logits` `[B, 2]`."""
        hidden_BSD = self.embeddings(batch["token_ids"], batch["token_type_ids"], training=training)
        context = PaddingContext(batch["sequence_ids"])
        for block in self.blocks:
            hidden_BSD = block(hidden_BSD, context=context, training=training)
        table_VD = self.embeddings.word_embeddings_VD
        return {
            "mlm_logits": self.predictions(hidden_BSD, batch["prediction_positions"], table_VD),
            "nsp_logits": self.classifier(ops.tanh(self.pooler(hidden_BSD[:, 0]))),
        }


class PlainObjective(Objective):
    """The objective of `PlainBert`."""

    def build_model(self, config, seed):
        """`PlainBert` with all its variables, which are random."""
        keras.utils.set_random_seed(seed)
        model = PlainBert(config)
        model.build()
        return model


def plain_objective():
    """The `Objective` of a `PlainBert`: a row is a sequence, and all predictions count alike."""
    return PlainObjective(
        head=PRETRAINING,
        features=RECORDED,
        outputs={"mlm_logits": "P", "nsp_logits": "K"},
        sums=plain_sums,
        counts=plain_counts,
        losses={"mlm_loss": "num_predictions", "nsp_loss": "num_sequences"},
        accuracies={
            "mlm_accuracy": ("mlm_correct", "num_predictions"),
            "nsp_accuracy": ("nsp_correct", "num_sequences"),
        },
    )


def plain_sums(outputs, batch):
    """Sums of losses and accuracies where a row is a sequence: `sums` of `plain_objective`."""
    used_BP = ops.cast(batch["prediction_sequences"] > 0, "float32")
    nll_BP, right_BP = nll_and_right(outputs["mlm_logits"], batch["prediction_ids"])
    # Each row holds one sequence, in slot 0
    nsp_nll_B, nsp_right_B = nll_and_right(outputs["nsp_logits"], batch["nsp_labels"][:, 0])
    return {
        "mlm_loss": ops.sum(nll_BP * used_BP),
        "nsp_loss": ops.sum(nsp_nll_B),
        "mlm_correct": ops.sum(right_BP * used_BP),
        "nsp_correct": ops.sum(nsp_right_B),
        **plain_counts(batch),
    }


def plain_counts(batch):
    """Numbers of predictions, rows, tokens and their pairs, where a row is a sequence."""
    lengths_B = ops.sum(ops.cast(batch["sequence_ids"] > 0, "float32"), axis=1)
    return {
        "num_predictions": ops.sum(ops.cast(batch["prediction_sequences"] > 0, "float32")),
        "num_sequences": ops.cast(batch["nsp_labels"].shape[0], "float32"),
        "num_tokens": ops.sum(lengths_B),
        "num_pairs": ops.sum(ops.square(lengths_B)),
    }
