"""What a BERT computes that knows nothing of packs: the baseline that packing's overhead is measured against.

Legend: B rows per batch, S row length, D model width, P predictions per row, V vocabulary.
"""

import keras
from keras import ops

from bert_packed.models.layers import MaskedLanguageModelHead, PackedEmbeddings, TransformerBlock, dense
from bert_packed.objectives.losses import nll_and_right

SUM_NAMES = ("mlm_loss", "nsp_loss", "mlm_correct", "nsp_correct", "num_predictions", "num_sequences")


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
    """BERT for pre-training on rows that are each one sequence.

    The padding mask is `[B, 1, 1, S]`, positions are 0 to S - 1, [CLS] is the first token: what
    google-research/bert computes, in our layers. Of the batches of `PackedBertForPretraining` it reads
    `token_ids`, `sequence_ids` (> 0 is no padding), `token_type_ids` and `prediction_positions`.

    Args:
        config: `ModelConfig`.
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
        mask_B11S = batch["sequence_ids"][:, None, None, :] > 0
        for block in self.blocks:
            hidden_BSD = block(hidden_BSD, mask_B11S, training=training)
        table_VD = self.embeddings.word_embeddings_VD
        return {
            "mlm_logits": self.predictions(hidden_BSD, batch["prediction_positions"], table_VD),
            "nsp_logits": self.classifier(ops.tanh(self.pooler(hidden_BSD[:, 0]))),
        }


def plain_sums(outputs, batch):
    """Sums of losses and accuracies where a row is a sequence; predictions all count alike.

    Args:
        outputs: Of `PlainBert`.
        batch: Dict with `prediction_ids` and `prediction_sequences` `[B, P]` (> 0 is used), and `nsp_labels`
            `[B, K]`, whose first column counts.

    Returns:
        Dict of float32 scalars, `SUM_NAMES`.
    """
    used_BP = ops.cast(batch["prediction_sequences"] > 0, "float32")
    nsp_labels_B = batch["nsp_labels"][:, 0]
    nll_BP, right_BP = nll_and_right(outputs["mlm_logits"], batch["prediction_ids"])
    nsp_nll_B, nsp_right_B = nll_and_right(outputs["nsp_logits"], nsp_labels_B)
    return {
        "mlm_loss": ops.sum(nll_BP * used_BP),
        "nsp_loss": ops.sum(nsp_nll_B),
        "mlm_correct": ops.sum(right_BP * used_BP),
        "nsp_correct": ops.sum(nsp_right_B),
        "num_predictions": ops.sum(used_BP),
        "num_sequences": ops.cast(nsp_labels_B.shape[0], "float32"),
    }


def plain_normalizers(batch):
    """The denominators: the number of predictions, and of rows."""
    used = ops.sum(ops.cast(batch["prediction_sequences"] > 0, "float32"))
    return ops.maximum(used, 1.0), float(batch["nsp_labels"].shape[0])
