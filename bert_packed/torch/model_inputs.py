"""Arguments of a model of transformers for packs: positions, and what its attention knows sequences by.

Legend: B packs, S pack length.
"""

import dataclasses

import torch

from bert_packed.assembly.block_attention_mask import attention_mask
from bert_packed.assembly.given_columns import POSITION_IDS, SEQUENCE_IDS

ATTENTIONS = ("mask", "positions", "varlen")


@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """A function from the columns of packs to arguments of a model: `inputs` of `audit_model`.

    `PackingCollator` describes the fields; a causal model has no `mlm_probability`.
    """

    attention: str = "mask"
    sliding_window: int | None = None
    first_position: int = 0
    is_causal: bool = False
    dtype: torch.dtype = torch.float32
    return_seq_idx: bool = False

    def __call__(self, packs):
        """Turn a dict of arrays `[B, S]` into one of tensors, without `sequence_ids`."""
        packs = {name: torch.as_tensor(values) for name, values in packs.items()}
        sequence_ids = packs.pop(SEQUENCE_IDS)
        packs[POSITION_IDS] = packs[POSITION_IDS] + self.first_position
        if self.return_seq_idx:
            packs["seq_idx"] = (_starts(sequence_ids).cumsum(1) - 1).to(torch.int32)
        return packs | self._attention_arguments(sequence_ids)

    def _attention_arguments(self, sequence_ids):
        if self.attention == "positions":
            return {"use_cache": False}
        if self.attention == "varlen":
            return _varlen_arguments(sequence_ids)
        mask = packing_mask(sequence_ids, self.dtype, self.sliding_window, self.is_causal)
        return {"attention_mask": mask}


def packing_mask(sequence_ids, dtype, sliding_window=None, is_causal=False):
    """Additive mask `[B, 1, S, S]`; with a window a dict of two, as models with local attention take it."""
    mask, lowest = attention_mask(sequence_ids, dtype), torch.finfo(dtype).min
    places = torch.arange(mask.shape[-1], device=mask.device)
    distances = places[:, None] - places
    if is_causal:
        mask = mask.masked_fill(distances < 0, lowest)
    if sliding_window is None:
        return mask
    is_far = distances.abs() > sliding_window - is_causal  # a causal window counts the token itself
    return {"full_attention": mask, "sliding_attention": mask.masked_fill(is_far, lowest)}


def _varlen_arguments(sequence_ids):
    starts = _starts(sequence_ids).flatten().nonzero()[:, 0]
    offsets = torch.cat([starts, torch.tensor([sequence_ids.numel()])])
    longest, offsets = int(offsets.diff().max()), offsets.to(torch.int32)
    lengths = {"max_length_q": longest, "max_length_k": longest}
    return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets} | lengths


def _starts(sequence_ids):
    """True at the first token of each sequence, and of padding."""
    starts = torch.ones_like(sequence_ids, dtype=torch.bool)
    starts[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    return starts
