"""Vectors of texts: packed, run in one compiled shape, and returned in the order of the texts.

    encoder = load_encoder("my/model")
    vectors = encoder.encode(["one text", "another"])

Legend: B packs per batch, S pack length, D model width, n texts.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from bert_packed import schema
from bert_packed.architectures.registry import DTYPES, MASKED_LM
from bert_packed.assembly.update_packs import assemble_filled, pack_all
from bert_packed.checkpoints import starting_weights
from bert_packed.checkpoints.sentence_transformers import VectorSettings, unit
from bert_packed.core.hub import find_model
from bert_packed.core.settings import InputError
from bert_packed.objectives.features import TOKENS
from bert_packed.packing.arguments import check_choice
from bert_packed.parallel.targets import devices_here
from bert_packed.records.sequences import BERT_LAYOUT, make_sequences
from bert_packed.text.vocabularies import load_text_tokenizer, lowers_case
from bert_packed.training.engines import choose_backend

logger = logging.getLogger(__name__)

# Each takes a text's hidden states `[tokens, D]` and copies: a slice would keep the whole batch in memory
POOLINGS = {
    "mean": lambda hidden: hidden.mean(axis=0),
    "cls": lambda hidden: hidden[0].copy(),
    "none": lambda hidden: hidden.copy(),
}
DEFAULT_SETTINGS = VectorSettings()
PROMPT_NAMES = ("query", "passage", "document")  # that are no text to put before others
MANY_TEXTS = 1000  # from which on a terminal shows progress
NUM_SPECIAL = 2  # [CLS] and [SEP]
ALGORITHM = "lpfhp"  # plans at once, where others search
MOST_TOKENS = 1024  # of a text, unless more is asked for: dense scores of 8,192 tokens take 256 MiB a head
# Defaults: packs in a batch, and batches that threads compute at once
DEFAULTS = {"cpu": (1, 2)}
OTHER_DEFAULTS = (8, 1)


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """A model ready for texts."""

    forward: Callable  # compiled, from a batch of packs to hidden states `[B, S, D]`
    tokenize: Callable  # from a list of texts to a list of lists of ids, without special tokens
    cls_id: int
    sep_id: int
    max_seq_length: int  # S; longer texts are cut, [CLS] and [SEP] included in the count
    batch_size: int  # B
    width: int  # D
    num_batches_at_once: int = 1  # computed by a thread each
    settings: VectorSettings = DEFAULT_SETTINGS  # of a folder of sentence-transformers

    def encode(
        self, texts, pooling=None, max_sequences_per_pack="max", *, normalize=None, prompt=None, progress=None
    ):
        """The vectors of texts, each as it would be alone: float32 `[n, D]`, in the order of `texts`.

        Args:
            texts: List of str; an empty one is [CLS] [SEP].
            pooling: "mean" over a text's tokens, [CLS] and [SEP] among them; "cls", that of [CLS]; or "none",
                which returns a list of n arrays `[tokens, D]`; None for what the model's folder says, else
                "mean".
            max_sequences_per_pack: Texts per pack, at most; "max" for no limit, 1 for padded rows.
            normalize: True for vectors of length 1; None for what the model's folder says, else False.
            prompt: Text to put before each text, or the name of one of the model's prompts, as "query";
                None for the model's default.
            progress: True for a progress bar; None for one where standard error is a terminal and there are
                many texts.
        """
        if isinstance(texts, str):  # which would be a list of its characters
            raise ValueError(f"`texts` must be a list of str. Received: {texts[:40]!r}.")
        pooling = self.settings.pooling if pooling is None else pooling
        check_choice("pooling", pooling, POOLINGS)
        pool = POOLINGS[pooling]
        prompts = self.settings.prompts
        if prompt in PROMPT_NAMES and prompt not in prompts:
            known = ", ".join(prompts) or "none"
            raise InputError(f"`prompt` must be one of the model's, {known}. Received: {prompt!r}.")
        prompt = self.settings.default_prompt if prompt is None else prompts.get(prompt, prompt)
        if pooling == "none" and normalize:
            raise InputError("`normalize` must be left out for pooling='none'. Received: True.")
        tokens = self._tokens([prompt + text for text in texts] if prompt else texts)
        vectors = [None] * len(tokens)
        batches = pack_tokens(tokens, self.max_seq_length, self.batch_size, max_sequences_per_pack)
        disable = len(tokens) < MANY_TEXTS or None if progress is None else not progress
        with tqdm(total=len(tokens), desc="encode", unit="text", disable=disable) as bar:
            for (_, places), hidden_BSD in map_in_threads(
                lambda item: np.asarray(self.forward(item[0])), batches, self.num_batches_at_once
            ):
                for text, row, start in places:
                    hidden = hidden_BSD[row, start : start + len(tokens[text])]
                    vectors[text] = pool(hidden)
                bar.update(len(places))
        if pooling == "none":
            return vectors
        vectors = np.stack(vectors) if vectors else np.zeros((0, self.width), np.float32)
        return unit(vectors) if (self.settings.normalize if normalize is None else normalize) else vectors

    def packing_factor(self, texts):
        """Mean texts per pack when `encode` packs these texts; 1 for none."""
        if not texts:
            return 1.0
        lengths = np.array([len(ids) for ids in self._tokens(texts)], np.int64)
        return len(texts) / len(pack_all(lengths, self.max_seq_length, "max", ALGORITHM)[0])

    def _tokens(self, texts):
        """A list of ids per text, [CLS] and [SEP] included, at most S of them."""
        room = self.max_seq_length - NUM_SPECIAL
        return [[self.cls_id, *ids[:room], self.sep_id] for ids in self.tokenize(list(texts))]


def load_encoder(
    init_checkpoint,
    vocab_file="",
    bert_config_file="",
    do_lower_case=None,
    max_seq_length=None,
    batch_size=None,
    dtype="float32",
    num_batches_at_once=None,
):
    """Load a model for `encode`; logs a warning that names tensors of the file that no such model has.

    Args:
        init_checkpoint: Checkpoint of ours, Hugging Face or Google, or a name on the hub, as for
            `run_pretraining.py`.
        vocab_file: WordPieces, one a line, or a `tokenizer.json` of byte-level BPE; "" is the `vocab.txt` or
            else the `tokenizer.json` of the checkpoint, or of its run, as far as such a model reads it.
        bert_config_file: The model's shape; "" is as stored with the checkpoint.
        do_lower_case: True where text loses case and accents; None is as the run of the checkpoint or a
            Hugging Face folder's `tokenizer_config.json` says, else True. Of WordPieces alone.
        max_seq_length: S; None is 1,024, or where that is less the longest that the model has positions for,
            or was trained on, by its run or its `tokenizer_config.json`.
            Attention is by the fused kernel where there is one and 128 divides S, else by scores that grow
            with the square of S.
        batch_size: B; None is 1 on a CPU, where more are no faster, and 8 elsewhere.
        dtype: "float32" or "mixed_bfloat16".
        num_batches_at_once: Batches computed by a thread each; None is 2 on a CPU, and 1 elsewhere.
            1 is the caller's thread, whose `jax.default_matmul_precision` and the like others do not see.

    Raises:
        InputError: the checkpoint or vocabulary does not fit, or the model was trained without keeping
            sequences apart.
    """
    init_checkpoint = find_model(init_checkpoint)
    choose_backend()
    # Keras must not be imported before the backend is chosen
    from keras import ops

    from bert_packed.architectures.packed_model import build_model
    from bert_packed.checkpoints.export_formats import check_form
    from bert_packed.kernels.choose import choose_kernels
    from bert_packed.runs.vocabulary import find_vector_settings, find_vocab, known_case, known_length
    from bert_packed.training.backend import check_memory, compiled
    from bert_packed.training.engines.engine import named_weights

    config = starting_weights.read_model_config(init_checkpoint, bert_config_file)
    vocab_path = find_vocab(init_checkpoint, vocab_file, config)
    check_form(vocab_path, config)
    if do_lower_case is None:
        known = known_case(init_checkpoint)
        do_lower_case = True if known is None else known
    tokenizer = load_text_tokenizer(vocab_path, do_lower_case)
    settings = find_vector_settings(init_checkpoint, lowers_case(vocab_path, do_lower_case))
    length = max_seq_length if max_seq_length is not None or not settings else settings.max_seq_length
    model = init_checkpoint, bert_config_file
    starting_weights.check_reads(config, [MASKED_LM], length or 0, tokenizer.vocab_size, *model)
    if dtype not in DTYPES:
        raise InputError(f"`dtype` must be one of {', '.join(DTYPES)}. Received: {dtype!r}.")
    platform = devices_here().platform
    usual_size, usual_number = DEFAULTS.get(platform, OTHER_DEFAULTS)
    batch_size = _at_least_one("batch_size", batch_size, usual_size)
    num_batches_at_once = _at_least_one("num_batches_at_once", num_batches_at_once, usual_number)
    if length is None:
        length = min(
            config.max_position_embeddings, MOST_TOKENS, known_length(init_checkpoint) or MOST_TOKENS
        )
    if length < NUM_SPECIAL:
        raise InputError(f"`max_seq_length` must be at least {NUM_SPECIAL}. Received: {length}.")
    check_memory(config)
    kernels = choose_kernels("auto", config, length, platform)
    # The head is not used, so a checkpoint may lack any of it
    model = build_model(MASKED_LM, config, seed=0, dtype=dtype, **kernels.options)
    found = starting_weights.load(init_checkpoint, named_weights(model), config, MASKED_LM)
    if unknown := starting_weights.without_heads(found.unused, config):
        logger.warning("\n".join(dataclasses.replace(found, unused=unknown, missing=[]).lines()))
    return TextEncoder(
        compiled(lambda batch: ops.cast(model.encode(batch, training=False), "float32"), model),
        tokenizer.encode,
        tokenizer.cls_id,
        tokenizer.sep_id,
        length,
        batch_size,
        config.hidden_size,
        num_batches_at_once,
        settings or DEFAULT_SETTINGS,
    )


def similarity(one, other):
    """Cosines of vectors with other vectors: float32 `[n, m]`, of arrays `[n, D]` and `[m, D]`."""
    one, other = (np.atleast_2d(np.asarray(vectors, np.float32)) for vectors in (one, other))
    if one.shape[1] != other.shape[1]:
        raise ValueError(f"`other` must have {one.shape[1]} dimensions as `one`. Received: {other.shape[1]}.")
    return unit(one) @ unit(other).T


def pack_tokens(tokens, max_seq_length, batch_size, max_sequences_per_pack="max"):
    """Pack lists of 1 to S ids by longest-pack-first.

        tokens [[2 5 3] [2 3]], S=6   ->   token_ids     [[2 3 2 5 3 0]]
                                           sequence_ids  [[1 1 2 2 2 0]]
                                           position_ids  [[0 1 0 1 2 0]]
                                           places        [(1, 0, 0) (0, 0, 2)]

    Yields dicts of int32 arrays `[B, S]`, the last filled with empty packs, each with its `places`: a list of
    `(text, row, start)`.
    """
    if not tokens:
        return
    lengths = [len(ids) for ids in tokens]
    numbers = np.arange(1, len(tokens) + 1)
    columns = {"tokens": np.concatenate(tokens), "lengths": lengths, "record_numbers": numbers}
    sequences = make_sequences(BERT_LAYOUT, "", **columns)
    packs, spec = pack_all(sequences["lengths"], max_seq_length, max_sequences_per_pack, ALGORITHM)
    for first in range(0, len(packs), batch_size):
        some = packs.between(first, min(first + batch_size, len(packs)))
        arrays = assemble_filled(sequences, some, spec, batch_size)
        starts = arrays[schema.NEXT_SENTENCE_POSITIONS][some.owners, some.slots]
        # K of the plan differs between texts: with it, others would make another program
        batch = {feature.name: arrays[feature.record_name] for feature in TOKENS}
        yield batch, list(zip(some.members, some.owners, starts, strict=True))


def map_in_threads(function, items, num_threads):
    """Yield each item with the function's result, in order, computed by threads.

        items a b c d e, 2 threads    caller    a, takes a          takes b    takes c
                                      thread 1              b------>d------------>
                                      thread 2              c--------------->e------->

    The caller's thread makes the items, a few ahead of the results, and computes the first; with 1 thread it
    computes all. Errors of the function are raised in its item's place, those of the items at once. Then, and
    where the caller stops, calls that have begun are waited for and no other begins.
    """
    items = iter(items)
    if num_threads == 1:
        yield from ((item, function(item)) for item in items)
        return
    # The first call is made in the caller's thread: a function that compiles at its first call compiles once
    for item in items:
        yield item, function(item)
        break
    begun = deque()
    threads = ThreadPoolExecutor(num_threads, "map-in-threads")
    try:
        for item in items:
            begun.append((item, threads.submit(function, item)))
            if len(begun) > num_threads:  # one waits, so that no thread is idle while a result is taken
                yield _take_first(begun)
        while begun:
            yield _take_first(begun)
    finally:
        threads.shutdown(cancel_futures=True)


def _take_first(begun):
    item, result = begun.popleft()
    try:
        return item, result.result()
    finally:
        del result  # an error of it would hold this frame, which holds it, and the memory of both


def _at_least_one(name, given, default):
    if given is None:
        return default
    if not (isinstance(given, int) and given >= 1):
        raise InputError(f"`{name}` must be a whole number of at least 1. Received: {given!r}.")
    return given
