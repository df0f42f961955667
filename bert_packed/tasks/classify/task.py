"""Learning labels: scores while it trains, predictions, and the export."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bert_packed.architectures.registry import CLASSIFICATION
from bert_packed.checkpoints.pretrained_files import HUGGING_FACE_CONFIG
from bert_packed.checkpoints.starting_weights import stored_head, stored_labels
from bert_packed.core.command_line import print_table
from bert_packed.core.progress import count_of
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json, write_json, write_text
from bert_packed.records.sequences import Sequences, concatenate
from bert_packed.runs import run_directory
from bert_packed.runs.run_summary import describe_counts
from bert_packed.runs.vocabulary import run_folder
from bert_packed.tasks import run
from bert_packed.tasks.batches import LabelledSequences
from bert_packed.tasks.classify import scores as label_scores
from bert_packed.tasks.classify.config import BINARY
from bert_packed.tasks.classify.labels import (
    NUMBER,
    PROBLEMS,
    SEVERAL,
    SINGLE,
    Examples,
    Problem,
    find_problem,
    read_examples,
    weights_of,
)
from bert_packed.tasks.classify.losses import LABELS, classes_objective, numbers_objective, several_objective
from bert_packed.tasks.classify.reranking import RANKING_FILE, read_reranking
from bert_packed.tasks.config import ScoredConfig
from bert_packed.tasks.evaluation import Evaluation
from bert_packed.tasks.retrieval import find_qrels
from bert_packed.tasks.rows import make_text_sequences, source_files

PREDICTIONS_FILE, CONFUSION_FILE = "predictions.tsv", "confusion.json"
# A CrossEncoder of sentence-transformers applies one of these to a number
SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
NUM_TEXTS = "num_texts"  # entry of config.json: 1 for single texts, 2 for pairs
HEAD = "classification/classifier/"  # beginning of the names of its weights
MOST_SHOWN = 12  # classes whose confusion is printed, too


@dataclasses.dataclass(frozen=True)
class AskedFile:
    """A file to predict; `write` and `score` take the float32 logits `[n, C]` of its examples."""

    examples: Examples
    write: Callable  # from logits and the output directory
    score: Callable | None = None  # from logits to a dict of float


def finetune(config, processes):
    """Train, score, predict and export as a `ClassifyConfig` says: `FinetuningResult`."""
    text = run.read_text_model(config, processes)
    run.check_export(config)
    columns = config.columns, config.label_column, config.label_separator
    # Files are read before training: a mistake in them would show after hours
    training = read_examples(config.train_file, *columns) if config.do_train else None
    qrels = find_qrels(config.eval_file) if config.eval_file else None
    ranked = read_reranking(qrels, config.candidates_file) if qrels else None
    held_out = read_examples(config.eval_file, *columns) if config.eval_file and not qrels else None
    wanted = read_examples(config.predict_file, *columns, has_labels=False) if config.predict_file else None
    problem = _find_problem(config, training, held_out)
    names = f": {len(problem.names)} labels, {', '.join(problem.names):.200}" if problem.names else ""
    print(f"labels     {problem.kind}{names}")
    weights = weights_of(config.class_weights, problem, problem.numbers(training)) if training else None
    asked, evaluation = [], None
    if held_out:
        asked.append(_scored_file(config, problem, held_out))
        evaluation = label_scores.NAMES[problem.kind], source_files(config.eval_file)
    if ranked:
        if problem.kind != NUMBER:
            rule = "have labels, unless those of train_file are numbers, as with --number_loss=binary"
            raise InputError(f"{config.eval_file} must {rule}. Received: documents of queries.")
        asked.append(AskedFile(ranked.examples, ranked.write, ranked.score))
        candidates = [config.candidates_file] if config.candidates_file else []
        evaluation = ranked.names, [*ranked.retrieval.files, *candidates]
    if wanted:
        asked.append(AskedFile(wanted, functools.partial(_write_predictions, config, problem)))
    inputs = {"train_file": source_files(config.train_file)} if training else {}
    # An earlier call's would be taken for this one's
    replaced = PREDICTIONS_FILE, CONFUSION_FILE, RANKING_FILE, run_directory.SCORES_FILE
    return learn(config, text, problem, training, inputs, asked, evaluation, weights, replaced)


def _scored_file(config, problem, held_out):
    """The `AskedFile` of `eval_file`, whose predictions are written unless `predict_file` asks for others."""
    labels = problem.numbers(held_out)

    def score(logits):
        scores = label_scores.score(problem, logits, labels)
        return {name: 100 * value for name, value in scores.items()}

    def write(logits, folder):
        if problem.kind == SINGLE:
            _write_confusion(problem, label_scores.decide(problem, logits), labels, folder)
        if not config.predict_file:
            _write_predictions(config, problem, logits, folder)

    return AskedFile(held_out, write, score)


def learn(config, text, problem, training, inputs, asked, evaluation=None, weights=None, replaced=()):
    """Train on `Examples`, score while training, predict files, and export: `FinetuningResult`.

    Args:
        config, text, problem: `ScoredConfig`, `TextModel` and `Problem`.
        training: `Examples`; None without `do_train`.
        inputs: Dict from flag name to the files that `training` was read from.
        asked: List of `AskedFile`.
        evaluation: Names of the scores of `asked`, and the files that they come from; None for no scores.
        weights: Weights of the classes, float32 `[C]`; None for 1.
        replaced: Names of results of earlier calls, which are removed before those of this one are written.
    """
    for examples in (file.examples for file in asked):
        check_num_texts(problem, len(examples.texts), examples.path)
    labels = problem.numbers(training) if training else None
    predictor = Predictor(config, [(file, _sequences_of(config, text, file.examples)) for file in asked])

    def read_training():
        sequences = _sequences_of(config, text, training)
        # A chance is a label beside no others
        values = labels[:, None] if problem.is_chance else labels
        data = LabelledSequences(sequences, {LABELS.name: values}, classes=problem.names)
        return data, inputs

    def predict(model, folder):
        for name in replaced:
            (folder / name).unlink(missing_ok=True)
        return predictor.predict(model, folder) or None

    if evaluation:
        score_names, paths = evaluation
        evaluation = Evaluation(config, score_names, predictor.score, paths)
    new_head = HEAD if training and _has_other_head(config.init_checkpoint, problem) else ""
    objective = _objective_of(problem, weights)
    more = {"problem_type": problem.kind, NUM_TEXTS: problem.num_texts}
    if problem.kind == NUMBER:
        more["sentence_transformers"] = {"activation_fn": SIGMOID if problem.is_chance else IDENTITY}
    names = problem.names
    export = functools.partial(run.export_labels, config, text, names, more) if config.do_train else None
    return run.run_task(config, text, objective, read_training, predict, evaluation, export, new_head)


@dataclasses.dataclass(frozen=True)
class Predictor:
    """Predictions of files, all packed together, by a model whose program is compiled once."""

    config: ScoredConfig
    files: list[tuple[AskedFile, Sequences]]

    @functools.cached_property
    def _forward_of(self):
        """`run.forward_of`, which compiles a model once."""
        return functools.cache(run.forward_of)

    def _logits(self, model, files):
        """Of each file, float32 `[n, C]`; and the number of packs."""
        joined = concatenate([sequences for _, sequences in files])
        outputs, num_packs = run.predict_packed(self.config, self._forward_of(model), joined)
        ends = np.cumsum([len(sequences) for _, sequences in files])
        return np.split(np.stack(outputs["logits"]), ends[:-1]), num_packs

    def score(self, model):
        """Scores of the files that have labels: dict of float."""
        scored = [(file, sequences) for file, sequences in self.files if file.score]
        return _scores_of(scored, self._logits(model, scored)[0])

    def predict(self, model, folder):
        """Predict and write all files; returns `score`."""
        if not self.files:
            return {}
        found, num_packs = self._logits(model, self.files)
        print(f"predicted  {count_of(sum(map(len, found)), 'example')} in {count_of(num_packs, 'pack')}")
        for (file, _), logits in zip(self.files, found, strict=True):
            file.write(logits, folder)
        return _scores_of(self.files, found)


def _scores_of(files, found):
    scores = {}
    for (file, _), logits in zip(files, found, strict=True):
        scores |= file.score(logits) if file.score else {}
    return scores


def _objective_of(problem, weights):
    if problem.kind == SINGLE:
        return classes_objective(len(problem.names), weights)
    if problem.kind == SEVERAL:
        return several_objective(len(problem.names))
    return several_objective(1) if problem.is_chance else numbers_objective()


def _find_problem(config, training, held_out):
    """That of the training file; without training that of the model."""
    is_chance = config.number_loss == BINARY
    asked = SEVERAL if config.label_separator else config.problem_type
    asked = NUMBER if is_chance else asked
    if training:
        problem = find_problem(training, asked)
        return dataclasses.replace(problem, is_chance=is_chance, num_texts=len(training.texts))
    are_several = held_out is not None and all(isinstance(label, tuple) for label in held_out.labels)
    problem = stored_problem(config.init_checkpoint, asked, SEVERAL if are_several else SINGLE)
    return dataclasses.replace(problem, is_chance=problem.is_chance or is_chance)


def check_num_texts(problem, number, source):
    """Raise `InputError` where a model that learned single texts is asked about pairs, or the reverse."""
    if problem.num_texts not in (None, number):
        names = {1: "single texts", 2: "pairs of texts"}
        rule = f"have {names[problem.num_texts]}, as the model was trained on"
        raise InputError(f"{source} must {rule}. Received: {names[number]}.")


def _has_other_head(init_checkpoint, problem):
    """True where the head of a start has other labels than those to learn, or another order of them."""
    if not init_checkpoint:
        return False
    head, num_outputs = stored_head(init_checkpoint)
    if head != CLASSIFICATION:
        return False
    if num_outputs != max(len(problem.names), 1):
        return True
    return problem.kind != NUMBER and _names_of(init_checkpoint) not in ((), problem.names)


def _names_of(init_checkpoint):
    """The labels of a fine-tuned model; () where they have no names but those that transformers gives."""
    names = stored_labels(init_checkpoint)
    return () if names == tuple(f"LABEL_{number}" for number in range(len(names))) else names


def stored_problem(init_checkpoint, asked="auto", otherwise=SINGLE):
    """The `Problem` of a fine-tuned model; raises `InputError` where it does not classify sequences.

    Its kind is `asked`, or for "auto" what its folder says, or `model/` of its run, else a number for one
    output, or `otherwise`. Labels without a name have their numbers.
    """
    head, num_outputs = stored_head(init_checkpoint)
    if head != CLASSIFICATION:
        raise InputError(
            f"`init_checkpoint` must be fine-tuned to classify. Received: {init_checkpoint}, of head {head}."
        )
    folder = run_folder(init_checkpoint)
    places = [Path(init_checkpoint), *([folder / run.MODEL_FOLDER] if folder else [])]
    paths = (place / HUGGING_FACE_CONFIG for place in places)
    path = next((path for path in paths if path.is_file()), None)
    stored = read_json(path) if path else {}
    kind = asked
    if asked == "auto":
        kind = stored.get("problem_type") or (NUMBER if num_outputs == 1 else otherwise)
    if kind not in PROBLEMS:
        raise InputError(f"`problem_type` must be one of {', '.join(PROBLEMS)}. Received: {kind!r}.")
    num_texts = stored.get(NUM_TEXTS)
    if kind == NUMBER:
        activation = (stored.get("sentence_transformers") or {}).get("activation_fn")
        activation = activation or stored.get("sbert_ce_default_activation_function")
        return Problem(kind, (), activation == SIGMOID, num_texts)
    names = _names_of(init_checkpoint) or tuple(map(str, range(num_outputs)))
    return Problem(kind, names, num_texts=num_texts)


def _sequences_of(config, text, examples):
    sequences, num_cut = make_text_sequences(
        examples.texts, text.tokenizer, config.max_seq_length, examples.path
    )
    counts = {"cut to max_seq_length": num_cut, "lines without all columns left out": examples.num_torn}
    print(f"{examples.path}: {count_of(len(examples), 'example')}{describe_counts(counts)}", flush=True)
    return sequences


def _write_confusion(problem, predicted, labels, folder):
    """Write how often each class was predicted for each true one, and print it where they are few."""
    names = problem.names
    table = label_scores.confusion(predicted, labels, len(names))
    write_json(folder / CONFUSION_FILE, {"labels": list(names), "true_by_predicted": table.tolist()})
    if len(names) <= MOST_SHOWN:
        print("\npredicted, a row for each true class")
        rows = zip(names, table.tolist(), strict=True)
        print_table([{"true": name, **dict(zip(names, row, strict=True))} for name, row in rows])


def _write_predictions(config, problem, logits, folder):
    """Write `predictions.tsv`: the prediction, then the probability of each label."""
    kind, names = problem.kind, problem.names
    separator = config.label_separator or ","
    lines = ["\t".join(["prediction", *names])]
    chances, decisions = label_scores.probabilities(problem, logits), label_scores.decide(problem, logits)
    for row, decision in zip(chances, decisions, strict=True):
        shown = problem.shown(decision)
        shown = f"{shown:.6g}" if kind == NUMBER else shown
        shown = separator.join(shown) if kind == SEVERAL else shown
        lines.append("\t".join([shown, *(f"{value:.6g}" for value in row[: len(names)])]))
    write_text(str(folder / PREDICTIONS_FILE), "".join(f"{line}\n" for line in lines))
