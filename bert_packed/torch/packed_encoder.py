"""Packs in the encoder of a classifier, regression or tagger of `transformers`, and in nothing else of it.

    rows [n, L]  ->  packs [B, S]  ->  encoder  ->  [B, S, D]  ->  rows [n, L, D]  ->  pooler, head, loss

So the head sees sequences as if they were never packed.

Legend: n sequences, L the longest, B packs, S pack length, D model width.
"""

import torch

from bert_packed.assembly.block_attention_mask import attention_mask
from bert_packed.assembly.given_columns import refuse
from bert_packed.packing.arguments import shown
from bert_packed.torch.labelled_rows import IGNORED, LABELS
from bert_packed.torch.model_inputs import packing_mask
from bert_packed.torch.pretraining import check_attention

AFTER_PADDING, BOOLEAN, WINDOW = "positions after the padding id", "a mask of bools", "a window"
MODEL_TYPES = {  # and what each needs
    "bert": None,
    "distilbert": None,
    "electra": None,
    "roberta": AFTER_PADDING,
    "xlm-roberta": AFTER_PADDING,
    "deberta": BOOLEAN,
    "deberta-v2": BOOLEAN,
    "modernbert": WINDOW,
}
HEADS = ("ForSequenceClassification", "ForTokenClassification")


def enable_packing(model):
    """Let a model's encoder compute packs, where a batch of `PackingCollator(labels=...)` has them.

        model = enable_packing(AutoModelForSequenceClassification.from_pretrained("bert-base-cased"))
        collator = PackingCollator(tokenizer, 512, labels="sequence")

    Other batches are computed as before. Given `num_items_in_batch`, as from Trainer, the loss is that of
    the whole step: its sum over micro-batches is the mean over sequences, or over labelled tokens.

    Args:
        model: `AutoModelForSequenceClassification` or `AutoModelForTokenClassification` of one of
            `MODEL_TYPES`, with "sdpa" or "eager" attention.

    Returns:
        The same model, with hooks. Its weights, and what `save_pretrained` writes, stay those of its class.

    Raises:
        ValueError: the model cannot be packed; or, when called, its attention would ignore the mask, or it
            evaluates packs of `pack_dataset`, whose last batch Trainer would cut short.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in MODEL_TYPES:
        refuse("`model`", f"be one of {', '.join(MODEL_TYPES)}", kind or shown(model))
    name = type(model).__name__
    if not name.endswith(HEADS):
        refuse("`model`", f"be one {' or '.join(HEADS)}", name)
    if getattr(config, "is_decoder", False) or getattr(config, "conv_kernel_size", 0) > 0:
        refuse("`model`", "be an encoder without convolution, which would mix sequences", name)
    hooks, encoder = _Hooks(config, MODEL_TYPES[kind]), model.base_model
    model.register_forward_pre_hook(hooks.begin, with_kwargs=True)
    encoder.register_forward_pre_hook(hooks.pack, with_kwargs=True)
    if MODEL_TYPES[kind] == BOOLEAN:
        encoder.embeddings.register_forward_pre_hook(hooks.without_mask, with_kwargs=True)
    if getattr(encoder, "pooler", None) is not None:  # computed before the hook on outputs
        encoder.pooler.register_forward_pre_hook(hooks.unpack_input)
    encoder.register_forward_hook(hooks.unpack_output)
    model.register_forward_hook(hooks.end, with_kwargs=True)
    model.accepts_loss_kwargs = True  # so that Trainer hands `num_items_in_batch` to it
    return model


class _Hooks:
    """State that the hooks of a model share while it computes a batch."""

    def __init__(self, config, need):
        self.config, self.need = config, need
        self.index_BS = self.places_nL = self.num_items = None

    def begin(self, model, args, kwargs):
        kwargs = dict(kwargs)
        self.index_BS = kwargs.pop("pack_index", None)
        self.num_items = kwargs.pop("num_items_in_batch", None)
        num_examples, labels = kwargs.pop("num_examples", None), kwargs.get(LABELS)
        if self.index_BS is not None:
            check_attention(self.config)  # not at first: it may change
            if not model.training and num_examples != len(kwargs["input_ids"]):
                rule = "be sequences: Trainer would cut the last batch of packs short"
                refuse("rows of evaluation", rule, "rows of `pack_dataset`")
        is_regression = self.config.num_labels == 1 and type(model).__name__.endswith(HEADS[0])
        if labels is not None and is_regression:
            kwargs[LABELS] = labels.float()
        return args, kwargs

    def pack(self, encoder, args, kwargs):
        if self.index_BS is None:
            return None
        if args:
            args, kwargs = (), {"input_ids": args[0]} | kwargs
        ids_nL, (num_rows, length) = kwargs["input_ids"], kwargs["input_ids"].shape
        index_BS = self.index_BS.clamp(min=0)  # padding sees padding alone, whatever it holds
        packed = {"position_ids": index_BS % length}
        for name in ("input_ids", "token_type_ids"):
            if kwargs.get(name) is not None:
                packed[name] = kwargs[name].flatten()[index_BS]
        if self.need == AFTER_PADDING:
            packed["position_ids"] += self.config.pad_token_id + 1
        sequence_ids = torch.where(self.index_BS < 0, 0, self.index_BS // length + 1)
        if self.need == BOOLEAN:
            packed["attention_mask"] = attention_mask(sequence_ids)
        else:
            window = self.config.sliding_window if self.need == WINDOW else None
            packed["attention_mask"] = packing_mask(sequence_ids, encoder.dtype, window)
        # Where each token is among the packs, one after another; 0 for padding of rows, which no head counts
        rows = torch.where(self.index_BS < 0, num_rows * length, self.index_BS).flatten()
        places = rows.new_zeros(num_rows * length + 1)
        places.scatter_(0, rows, torch.arange(rows.numel(), device=rows.device))
        self.places_nL = places[:-1].view(ids_nL.shape)
        return args, kwargs | packed

    def without_mask(self, embeddings, args, kwargs):
        # It would multiply by a mask of another shape
        return (args, kwargs | {"mask": None}) if self.index_BS is not None else None

    def unpack(self, hidden_BSD):
        return hidden_BSD.flatten(0, 1)[self.places_nL]

    def unpack_input(self, pooler, args):
        return (self.unpack(args[0]), *args[1:]) if self.index_BS is not None else None

    def unpack_output(self, encoder, args, outputs):
        if self.index_BS is not None:
            outputs["last_hidden_state"] = self.unpack(outputs["last_hidden_state"])

    def end(self, model, args, kwargs, outputs):
        self.index_BS = self.places_nL = None
        if self.num_items is None or kwargs.get(LABELS) is None:
            return
        num_own = (kwargs[LABELS] != IGNORED).sum()
        if num_own:
            outputs["loss"] = outputs["loss"] * num_own / self.num_items
        else:  # a mean over nothing is NaN
            outputs["loss"] = 0 * outputs["logits"].sum()
