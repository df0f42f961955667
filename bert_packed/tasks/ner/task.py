"""Fine-tuning to tag words, such as named entities: objective, tags, and scores of entities.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack, C tags.
"""

import dataclasses
import functools

import numpy as np
from keras import ops

from bert_packed.architectures.registry import TOKEN_CLASSIFICATION
from bert_packed.checkpoints.starting_weights import read_labels, stored_head, stored_labels
from bert_packed.core.progress import count_of
from bert_packed.core.settings import InputError
from bert_packed.core.storage import write_text
from bert_packed.layers.context import gather_tokens
from bert_packed.objectives.features import PREDICTIONS, SEQUENCES
from bert_packed.objectives.objective import Objective, count_sequences, nll_and_right
from bert_packed.objectives.pretraining import prediction_weights
from bert_packed.records.sequences import without_predictions
from bert_packed.runs.run_summary import describe_counts
from bert_packed.tasks import run
from bert_packed.tasks.batches import LabelledSequences
from bert_packed.tasks.evaluation import Evaluation
from bert_packed.tasks.ner import conll
from bert_packed.tasks.ner import scores as entity_scores
from bert_packed.tasks.ner.config import NerConfig

PREDICTIONS_FILE = "predictions.txt"


def tags_objective(num_tags, tag_loss="per_sequence"):
    """One of C tags for each word, at its first token; words are the batch's predictions.

    `tag_loss` "per_sequence" is the mean over sequences of the mean over their words; "per_token" is the mean
    over all words of the step, as in transformers' run_ner.
    """
    return Objective(
        head=TOKEN_CLASSIFICATION,
        num_outputs=num_tags,
        features=(*SEQUENCES, *PREDICTIONS),
        outputs={"logits": "S"},
        sums=functools.partial(tag_sums, tag_loss=tag_loss),
        counts=tag_counts,
        losses={"loss": "num_sequences" if tag_loss == "per_sequence" else "num_predictions"},
        accuracies={"accuracy": ("correct", "num_predictions")},
        skips_empty=True,
    )


def tag_sums(outputs, batch, tag_loss):
    """Sums of `tags_objective`: `loss`, `correct`, and `tag_counts`."""
    sequences_BP, num_slots = batch["prediction_sequences"], batch["slot_weights"].shape[1]
    logits_BPC = gather_tokens(outputs["logits"], batch["prediction_positions"])
    nll_BP, right_BP = nll_and_right(logits_BPC, batch["prediction_ids"])
    return {
        "loss": ops.sum(nll_BP * prediction_weights(sequences_BP, num_slots, tag_loss)),
        "correct": ops.sum(right_BP * prediction_weights(sequences_BP, num_slots, "per_token")),
        **tag_counts(batch),
    }


def tag_counts(batch):
    """Number of words, `num_predictions`, and `count_sequences`."""
    used_BP = ops.cast(batch["prediction_sequences"] > 0, "float32")
    return {"num_predictions": ops.sum(used_BP), **count_sequences(batch)}


def finetune(config, processes):
    """Train, predict and score as a `NerConfig` says: `FinetuningResult`."""
    text = run.read_text_model(config, processes)
    run.check_export(config)
    training = conll.read_conll(config.train_file) if config.do_train else None
    if training and training.tags is None:
        raise InputError(f"{config.train_file} must have a tag in its last column. Received: one column.")
    names = _label_names(config, training)
    print(f"labels     {len(names)}: {', '.join(names)}")

    def sequences_of(path, sentences, tags):
        sizes = config.max_seq_length, config.doc_stride
        found = conll.make_tag_sequences(sentences.words, tags, text.tokenizer, *sizes, path)
        counts = {
            "sentences cut into windows of max_seq_length": found.num_cut,
            f"words without a token read as {text.tokenizer.unknown_token}": found.num_empty,
        }
        print(
            f"{path}: {count_of(len(sentences.words), 'sentence')}, {count_of(sentences.num_words, 'word')}, "
            f"{count_of(len(found.sequences), 'sequence')}{describe_counts(counts)}",
            flush=True,
        )
        return found

    # Files are read before training: a mistake in them would show after hours
    numbers = conll.number_tags(config.train_file, training, names) if training else None
    predictor, evaluation = None, None
    if config.do_predict:
        sentences = conll.read_conll(config.predict_file)
        predictor = Predictor(config, names, sentences, sequences_of(config.predict_file, sentences, None))
        if sentences.tags:
            scored = entity_scores.names_of(sentences.tags)
            evaluation = Evaluation(config, scored, predictor.score, [config.predict_file])
    for name in ("eval_steps", "keep_best", "best_score"):
        if getattr(config, name) and not evaluation:
            rule = "be left out unless predict_file has tags, and is predicted"
            raise InputError(f"`{name}` must {rule}. Received: {getattr(config, name)}.")

    def read_training():
        found = sequences_of(config.train_file, training, numbers)
        inputs = {"train_file": [config.train_file]}
        if config.labels_file:
            inputs["labels_file"] = [config.labels_file]
        return LabelledSequences(found.sequences, {}, classes=names), inputs

    objective = tags_objective(len(names), config.tag_loss)
    predict = predictor and predictor.predict
    export = functools.partial(run.export_labels, config, text, names, None) if config.do_train else None
    return run.run_task(config, text, objective, read_training, predict, evaluation, export)


def _label_names(config, training):
    """The tags by number: as given, else as the checkpoint has them, else those of the training file."""
    if config.labels_file:
        return read_labels(config.labels_file)
    if config.init_checkpoint and stored_head(config.init_checkpoint)[0] == TOKEN_CLASSIFICATION:
        if names := stored_labels(config.init_checkpoint):
            return names
        raise InputError(
            "`labels_file` must be given where `init_checkpoint` does not name its labels. Received: nothing."
        )
    if training is None:
        raise InputError(
            f"`init_checkpoint` must be fine-tuned to tag words unless --do_train. Received: "
            f"{config.init_checkpoint}."
        )
    return conll.find_tags(training)


def logits_of_words(found, logits, num_words):
    """Float32 `[num_words, C]` of all words, from `TagSequences` and logits by sequence, `[tokens, C]`."""
    starts, positions = found.sequences.offsets("prediction_ids"), found.sequences["prediction_positions"]
    # Windows overlap, but each word is predicted in one of them alone
    by_word = np.zeros((num_words, logits[0].shape[-1]), np.float32)
    for number, of_tokens in enumerate(logits):
        own = slice(starts[number], starts[number + 1])
        by_word[found.words[own]] = of_tokens[positions[own]]
    return by_word


@dataclasses.dataclass(frozen=True)
class Predictor:
    """Tags of the words of a file, by a model whose program is compiled once."""

    config: NerConfig
    names: tuple[str, ...]
    sentences: conll.Sentences
    found: conll.TagSequences

    @functools.cached_property
    def _forward_of(self):
        """`run.forward_of`, which compiles a model once."""
        return functools.cache(run.forward_of)

    def _tags(self, model):
        """The tags of each sentence, and the number of packs."""
        sequences, sentences = without_predictions(self.found.sequences), self.sentences
        outputs, num_packs = run.predict_packed(self.config, self._forward_of(model), sequences)
        by_word = logits_of_words(self.found, outputs["logits"], sentences.num_words).argmax(axis=1)
        ends = np.cumsum([len(words) for words in sentences.words])
        parts = np.split(by_word, ends[:-1])
        return [[self.names[tag] for tag in tags] for tags in parts], num_packs

    def score(self, model):
        """Scores of a file with tags: dict of float."""
        return entity_scores.score(self.sentences.tags, self._tags(model)[0])

    def predict(self, model, folder):
        """Tag every word and write the tags; returns `score`, or {} where the file has no tags."""
        predicted, num_packs = self._tags(model)
        sentences = self.sentences
        print(
            f"predicted  {count_of(sentences.num_words, 'word')} of "
            f"{count_of(len(self.found.sequences), 'sequence')} in {count_of(num_packs, 'pack')}"
        )
        columns = [sentences.words, *([sentences.tags] if sentences.tags else []), predicted]
        lines = []
        for rows in zip(*columns, strict=True):
            lines += [*(" ".join(row) for row in zip(*rows, strict=True)), ""]
        write_text(str(folder / PREDICTIONS_FILE), "".join(f"{line}\n" for line in lines))
        return entity_scores.score(sentences.tags, predicted) if sentences.tags else {}
