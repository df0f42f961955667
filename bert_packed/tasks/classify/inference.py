"""Labels of texts, and tags of words, from Python: packed, and returned in the order of the texts.

    classifier = load_classifier("my/classes/model")
    labels, probabilities = classifier.predict(["one text", "another"])

Legend: n texts, C labels, W words of a sentence, K sequences per pack, S pack length.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import special

from bert_packed.assembly.update_packs import pack_all
from bert_packed.core.hub import find_model
from bert_packed.core.settings import InputError
from bert_packed.records.sequences import without_predictions
from bert_packed.tasks.classify.labels import Problem
from bert_packed.tasks.rows import make_text_sequences
from bert_packed.training.engines import choose_backend

ALGORITHM = "lpfhp"  # plans at once, where others search
MOST_TOKENS = 512  # of a text, unless more is asked for: scores of attention grow with the square


class Predictions(NamedTuple):
    """The labels of n texts."""

    labels: list  # a str each; of several labels a tuple of str; of numbers a float; of words a list of str
    # Float32 `[n, C]`, in the order of `names`; numbers as they are, `[n, 1]`; of words a list of n `[W, C]`
    probabilities: np.ndarray | list


@dataclasses.dataclass(frozen=True)
class TextClassifier:
    """A fine-tuned model ready for texts."""

    forward: Callable  # compiled, from a batch of packs to logits `[B, K, C]`
    tokenizer: object
    problem: Problem
    max_seq_length: int  # S; longer texts are cut
    batch_size: int  # packs

    @property
    def names(self):
        """Names of the C labels; () for numbers."""
        return self.problem.names

    def predict(self, texts):
        """The labels of texts, each as it would have alone: `Predictions`, in the order of `texts`.

        Args:
            texts: List of str, or of pairs of str for a model that was trained on pairs. Long lists show
                their progress where standard error is a terminal.
        """
        # The modules import Keras, whose backend is chosen by now
        from bert_packed.tasks.classify.scores import decide, probabilities
        from bert_packed.tasks.classify.task import check_num_texts

        columns = _columns_of(texts)
        if not columns[0]:
            return Predictions([], np.zeros((0, max(len(self.names), 1)), np.float32))
        check_num_texts(self.problem, len(columns), "`texts`")
        sequences, _ = make_text_sequences(columns, self.tokenizer, self.max_seq_length)
        logits = np.stack(_predict(self, sequences))
        shown = [self.problem.shown(one) for one in decide(self.problem, logits).tolist()]
        return Predictions(shown, probabilities(self.problem, logits))


@dataclasses.dataclass(frozen=True)
class WordTagger:
    """A fine-tuned model ready to tag words."""

    forward: Callable  # compiled, from a batch of packs to logits `[B, S, C]`
    tokenizer: object
    names: tuple[str, ...]  # of the C tags
    max_seq_length: int  # S; longer sentences are cut into windows that overlap by half
    batch_size: int  # packs

    def predict(self, sentences):
        """The tags of the words of sentences: `Predictions`; `sentences` is a list of lists of str."""
        from bert_packed.tasks.ner.conll import make_tag_sequences
        from bert_packed.tasks.ner.task import logits_of_words

        sentences = list(sentences)
        for number, words in enumerate(sentences):
            is_sound = isinstance(words, list | tuple) and all(isinstance(word, str) for word in words)
            if not (is_sound and words):
                raise InputError(f"`sentences[{number}]` must be a list of words. Received: {words!r:.80}.")
        if not sentences:
            return Predictions([], [])
        sizes = self.max_seq_length, self.max_seq_length // 2
        found = make_tag_sequences(list(map(list, sentences)), None, self.tokenizer, *sizes)
        sequences = without_predictions(found.sequences)
        ends = np.cumsum([len(words) for words in sentences])
        logits = logits_of_words(found, _predict(self, sequences), int(ends[-1]))
        parts = np.split(special.softmax(logits, axis=1), ends[:-1])
        return Predictions([[self.names[tag] for tag in part.argmax(axis=1)] for part in parts], parts)


def _predict(model, sequences):
    """The logits of each sequence, computed packed: list of arrays."""
    # The module imports Keras, whose backend is chosen by now
    from bert_packed.tasks.batches import predict

    packs, spec = pack_all(sequences["lengths"], model.max_seq_length, "max", ALGORITHM)
    # There are few values of K, since each is another program
    depth = min(1 << (spec.max_sequences_per_pack - 1).bit_length(), model.max_seq_length)
    spec = dataclasses.replace(spec, max_sequences_per_pack=depth)
    return predict(model.forward, sequences, packs, spec, model.batch_size)["logits"]


def _columns_of(texts):
    """One list of texts, or two of pairs; raises `InputError`."""
    if isinstance(texts, str):  # which would be a list of its characters
        raise InputError(f"`texts` must be a list of str or of pairs. Received: {texts[:40]!r}.")
    texts = list(texts)
    rows = [text if isinstance(text, tuple | list) else (text,) for text in texts]
    size = 2 if rows and isinstance(texts[0], tuple | list) else 1
    for number, (text, row) in enumerate(zip(texts, rows, strict=True)):
        is_sound = len(row) == size and all(isinstance(part, str) for part in row)
        if not is_sound or isinstance(text, str) != (size == 1):
            rule = "a pair of str" if size == 2 else "a str"
            raise InputError(f"`texts[{number}]` must be {rule}, as the first. Received: {text!r:.80}.")
    return [list(column) for column in zip(*rows, strict=True)] or [[]]


def load_classifier(
    init_checkpoint, vocab_file="", max_seq_length=None, batch_size=8, problem_type="auto", dtype="float32"
):
    """Load a model that `bert-packed classify`, `glue`, `ner` or transformers fine-tuned.

    It is a `TextClassifier`, or a `WordTagger` where the model tags words.

    Args:
        init_checkpoint: Folder `model` of `classify`, a run of fine-tuning, whose last weights it takes, or a
            Hugging Face folder, or name on the hub, of `AutoModelForSequenceClassification` or
            `AutoModelForTokenClassification`.
        vocab_file: WordPieces, one a line, or a `tokenizer.json` of byte-level BPE; "" is that of the folder.
        max_seq_length: S; None is what the folder says, at most 512.
        batch_size: Packs computed at once.
        problem_type: Kind of the labels, as transformers names it; "auto" is as the folder says.
        dtype: "float32" or "mixed_bfloat16".

    Raises:
        InputError: the checkpoint or vocabulary does not fit, or the model does not classify sequences.
    """
    init_checkpoint = find_model(init_checkpoint)
    choose_backend()
    # Keras must not be imported before the backend is chosen
    from bert_packed.architectures.packed_model import build_model
    from bert_packed.architectures.registry import CLASSIFICATION, TOKEN_CLASSIFICATION
    from bert_packed.checkpoints import starting_weights
    from bert_packed.checkpoints.export_formats import check_form
    from bert_packed.runs import vocabulary
    from bert_packed.tasks.classify.task import stored_problem
    from bert_packed.tasks.run import forward_of
    from bert_packed.text.vocabularies import load_text_tokenizer
    from bert_packed.training.backend import check_memory
    from bert_packed.training.engines.engine import named_weights

    config = starting_weights.read_model_config(init_checkpoint, "")
    path = vocabulary.find_vocab(init_checkpoint, vocab_file, config)
    check_form(path, config)
    known = vocabulary.known_case(init_checkpoint)
    tokenizer = load_text_tokenizer(path, True if known is None else known)
    for name, value, least in (("max_seq_length", max_seq_length, 8), ("batch_size", batch_size, 1)):
        if value is not None and not (isinstance(value, int) and value >= least):
            raise InputError(f"`{name}` must be a whole number of at least {least}. Received: {value!r}.")
    length = max_seq_length or min(
        config.max_position_embeddings, vocabulary.known_length(init_checkpoint) or MOST_TOKENS, MOST_TOKENS
    )
    sizes = length, tokenizer.vocab_size
    head, num_outputs = starting_weights.stored_head(init_checkpoint)
    tags_words = head == TOKEN_CLASSIFICATION
    if not tags_words:
        head, problem = CLASSIFICATION, stored_problem(init_checkpoint, problem_type)
    starting_weights.check_reads(config, [head], *sizes, init_checkpoint, "")
    check_memory(config)
    model = build_model(head, config, seed=0, dtype=dtype, num_outputs=num_outputs)
    found = starting_weights.load(init_checkpoint, named_weights(model), config, head)
    if found.missing:  # random values would predict noise
        raise InputError(
            f"`init_checkpoint` must have all weights of a classifier. Received: {init_checkpoint}, which "
            f"lacks {', '.join(found.missing):.200}."
        )
    forward = forward_of(model)
    if tags_words:
        names = starting_weights.stored_labels(init_checkpoint) or tuple(map(str, range(num_outputs)))
        return WordTagger(forward, tokenizer, names, length, batch_size)
    return TextClassifier(forward, tokenizer, problem, length, batch_size)
