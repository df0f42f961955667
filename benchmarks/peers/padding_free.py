"""Training steps of a BERT without padding, on torch: the fastest peer that we could write.

The tokens of all sequences follow one another. Attention is inside each sequence, logits are of predictions
alone, and blocks and head are compiled on a GPU. It imports torch: only a `PeerProcess` should import it.

Legend: T tokens of a batch, P predictions of a batch, Q sequences of a batch, D model width, N heads, H head
width, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.peers.transformers_models import IGNORED_LABEL, find_device, import_torch, make_update

# A block of ours has these layers, each beside those of transformers that it holds
_LAYERS_OF_BLOCK = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attended": ("attention.output.dense",),
    "norm": ("attention.output.LayerNorm",),
    "inner": ("intermediate.dense",),
    "outer": ("output.dense",),
    "last_norm": ("output.LayerNorm",),
}
_LAYERS = {
    "embedding_norm": "bert.embeddings.LayerNorm",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
    "pooler": "bert.pooler.dense",
    "classifier": "cls.seq_relationship",
}
_TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")


class Block(nn.Module):
    """An encoder block, in two parts with the attention between them."""

    def __init__(self, config):
        super().__init__()
        width, epsilon = config.hidden_size, config.layer_norm_eps
        self.num_heads, self.rate = config.num_attention_heads, config.hidden_dropout_prob
        self.qkv = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=epsilon)
        self.inner = nn.Linear(width, config.intermediate_size)
        self.outer = nn.Linear(config.intermediate_size, width)
        self.last_norm = nn.LayerNorm(width, eps=epsilon)

    def project(self, hidden_TD):
        """Queries, keys and values, each `[T, N, H]`."""
        return self.qkv(hidden_TD).unflatten(1, (3, self.num_heads, -1)).unbind(1)

    def finish(self, hidden_TD, found_TNH):
        """The block's output `[T, D]` from its input and what attention found."""
        found_TD = self.attended(found_TNH.flatten(1))
        hidden_TD = self.norm(hidden_TD + functional.dropout(found_TD, self.rate, self.training))
        inner_TD = self.outer(functional.gelu(self.inner(hidden_TD)))
        return self.last_norm(hidden_TD + functional.dropout(inner_TD, self.rate, self.training))


class Bert(nn.Module):
    """BERT with both pre-training heads."""

    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.rate = config.hidden_dropout_prob
        self.word_embeddings = nn.Embedding(config.vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.embedding_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.pooler = nn.Linear(width, width)
        self.classifier = nn.Linear(width, 2)

    def embed(self, batch):
        """Input of the first block, `[T, D]`."""
        hidden_TD = (
            self.word_embeddings(batch["token_ids"])
            + self.position_embeddings(batch["position_ids"])
            + self.token_type_embeddings(batch["token_type_ids"])
        )
        return functional.dropout(self.embedding_norm(hidden_TD), self.rate, self.training)

    def losses(self, hidden_TD, batch):
        """Mean masked-LM loss of predictions and mean next-sentence loss of sequences, added up."""
        gathered_PD = functional.gelu(self.transform(hidden_TD[batch["prediction_positions"]]))
        logits_PV = functional.linear(
            self.transform_norm(gathered_PD), self.word_embeddings.weight, self.output_bias
        )
        pooled_QD = torch.tanh(self.pooler(hidden_TD[batch["cls_positions"]]))
        mlm = functional.cross_entropy(logits_PV, batch["labels"], ignore_index=IGNORED_LABEL)
        next_sentence = functional.cross_entropy(
            self.classifier(pooled_QD), batch["nsp_labels"], ignore_index=IGNORED_LABEL
        )
        return mlm + next_sentence


def attend_one_by_one(query_TNH, key_TNH, value_TNH, batch, rate):
    """Attention of one sequence after another, by torch's kernel for it."""
    parts = (one.split(batch["lengths"]) for one in (query_TNH, key_TNH, value_TNH))
    found = [
        # The batch is of one: without that axis torch takes none of its fused kernels
        functional.scaled_dot_product_attention(*(one.transpose(0, 1)[None] for one in part), dropout_p=rate)
        for part in zip(*parts, strict=True)
    ]
    return torch.cat([one[0].transpose(0, 1) for one in found])


def attend_nested(query_TNH, key_TNH, value_TNH, batch, rate):
    """Attention of all sequences at once as nested tensors, with dropout, by torch's own kernels."""

    def nested(values_TNH):
        lengths = {"min_seqlen": min(batch["lengths"]), "max_seqlen": max(batch["lengths"])}
        values_TNH = values_TNH.contiguous()  # the CPU's kernel takes no views
        return torch.nested.nested_tensor_from_jagged(values_TNH, batch["offsets"], **lengths).transpose(1, 2)

    found = functional.scaled_dot_product_attention(
        *map(nested, (query_TNH, key_TNH, value_TNH)), dropout_p=rate
    )
    return found.transpose(1, 2).values()


def attend_by_blocks(query_TNH, key_TNH, value_TNH, batch, rate):
    """Attention of all sequences at once by FlexAttention, in the blocks of their mask; it has no dropout."""
    arguments = (one.transpose(0, 1)[None] for one in (query_TNH, key_TNH, value_TNH))
    return compiled_flex_attention(*arguments, block_mask=batch["block_mask"])[0].transpose(0, 1)


# If it were not compiled, it would compute all T x T scores
compiled_flex_attention = torch.compile(flex_attention, dynamic=False)
ATTENTIONS = {"one by one": attend_one_by_one, "nested tensors": attend_nested, "flex": attend_by_blocks}


class Training:
    """Training steps of `Bert` from a folder of transformers, on its batches.

    On a GPU where there is one. `batches` are from `training.without_padding`, `attention` is a key of
    `ATTENTIONS`; `recipe` and `is_mixed` are as in `transformers_models.Training`.
    """

    def __init__(self, folder, model_config, batches, attention, recipe, is_mixed):
        _, transformers = import_torch()
        self._device = find_device(torch)
        theirs = transformers.BertForPreTraining.from_pretrained(folder).state_dict()
        self._model = Bert(model_config)
        self._model.load_state_dict(_our_tensors(theirs, model_config.num_hidden_layers))
        self._model.to(self._device).train()
        self._rate, self._attend = model_config.attention_probs_dropout_prob, ATTENTIONS[attention]
        self._is_mixed = is_mixed
        self._update = make_update(torch, self._model, **recipe)
        self._batches = [self._prepare(one, attention) for one in batches]
        self._parts = Block.project, Block.finish, Bert.losses
        if self._device == "cuda":
            # Parts are compiled one by one, so that one block is compiled for all of them
            self._compiled = [torch.compile(part, dynamic=False) for part in self._parts]
        else:
            self._compiled = self._parts

    def loss(self):
        """Loss of the first batch in float32, without dropout and not compiled."""
        self._model.eval()
        with torch.inference_mode():
            value = self._run(self._batches[0], *self._parts, rate=0.0).item()
        self._model.train()
        return value

    def step(self, repeat):
        """Step on one of the batches, the next with each repeat; returns its loss."""
        batch = self._batches[repeat % len(self._batches)]

        def compute_loss():
            with torch.autocast(self._device, torch.bfloat16, enabled=self._is_mixed):
                return self._run(batch, *self._compiled, rate=self._rate)

        return self._update(compute_loss)

    def _run(self, batch, project, finish, losses, rate):
        hidden_TD = self._model.embed(batch)
        for block in self._model.blocks:
            hidden_TD = finish(block, hidden_TD, self._attend(*project(block, hidden_TD), batch, rate))
        return losses(self._model, hidden_TD, batch)

    def _prepare(self, batch, attention):
        lengths = batch["lengths"].tolist()
        tensors = {
            name: torch.tensor(values, dtype=torch.long, device=self._device)
            for name, values in batch.items()
        }
        tensors["offsets"] = functional.pad(tensors["lengths"].cumsum(0), (1, 0))
        if attention == "flex":
            number_T = torch.arange(len(lengths), device=self._device).repeat_interleave(tensors["lengths"])
            size = len(number_T)
            tensors["block_mask"] = create_block_mask(
                lambda _, head, query, key: number_T[query] == number_T[key],
                *(None, None, size, size),
                device=self._device,
            )
        return {**tensors, "lengths": lengths}


def _our_tensors(theirs, num_blocks):
    """The tensors of `Bert` from those of `BertForPreTraining`: dict."""
    ours = {f"{name}.weight": theirs[f"bert.embeddings.{name}.weight"] for name in _TABLES}
    ours["output_bias"] = theirs["cls.predictions.bias"]
    for kind in ("weight", "bias"):
        ours |= {f"{name}.{kind}": theirs[f"{layer}.{kind}"] for name, layer in _LAYERS.items()}
        for number in range(num_blocks):
            for name, layers in _LAYERS_OF_BLOCK.items():
                parts = [theirs[f"bert.encoder.layer.{number}.{layer}.{kind}"] for layer in layers]
                ours[f"blocks.{number}.{name}.{kind}"] = torch.cat(parts)
    return ours
