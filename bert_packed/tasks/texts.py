"""Sequences of texts, or of pairs of texts, as BERT reads them."""

import numpy as np

from bert_packed.records.sequences import BERT_LAYOUT, make_sequences


def make_text_sequences(texts, tokenizer, max_seq_length, path=""):
    """`[CLS] a [SEP]`, or `[CLS] a [SEP] b [SEP]`, cut to the length as google-research/bert does.

    `texts` is a list of one or two lists of n texts, `tokenizer` a `tokenization.TextTokenizer`. Returns
    `Sequences` of n sequences without predictions, and the number of those that were cut.
    """
    encoded = [tokenizer.encode(column) for column in texts]
    room = max_seq_length - 1 - len(encoded)
    tokens, type_ids, lengths = [], [], []
    num_cut = 0
    for parts in zip(*encoded, strict=True):
        sizes = cut_sizes([len(part) for part in parts], room)
        num_cut += sum(sizes) < sum(map(len, parts))
        tokens.append(tokenizer.cls_id)
        type_ids.append(0)
        for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            tokens.extend((*part[:size], tokenizer.sep_id))
            type_ids.extend([number] * (size + 1))
        lengths.append(1 + sum(sizes) + len(sizes))
    sequences = make_sequences(
        BERT_LAYOUT,
        str(path),
        tokens=tokens,
        token_type_ids=type_ids,
        lengths=lengths,
        record_numbers=np.arange(1, len(lengths) + 1),
    )
    return sequences, num_cut


def cut_sizes(sizes, room):
    """Number of tokens of each text to keep: [5 9] in 8 -> [4 4], [2 9] in 8 -> [2 6]."""
    sizes = list(sizes)
    # Token by token off the longer text, as google-research/bert does; of equal ones off the second
    while sum(sizes) > room:
        longest = len(sizes) - 1 if sizes[-1] >= sizes[0] else 0
        sizes[longest] -= 1
    return sizes
