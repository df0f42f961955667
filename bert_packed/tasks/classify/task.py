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
from bert_packed.records.sequences import Sequences
from bert_packed.runs.exports import write_model_card
from bert_packed.runs.run_summary import describe_counts
from bert_packed.runs.vocabulary import run_folder
from bert_packed.tasks import run
from bert_packed.tasks.batches import LabelledSequences
from bert_packed.tasks.classify import scores as label_scores
from bert_packed.tasks.classify.config import BINARY, ClassifyConfig
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
from bert_packed.tasks.evaluation import Evaluation, take_best
from bert_packed.tasks.rows import make_text_sequences, source_files

PREDICTIONS_FILE, CONFUSION_FILE = "predictions.tsv", "confusion.json"
# A CrossEncoder of sentence-transformers applies one of these to a number
SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
NUM_TEXTS = "num_texts"  # entry of config.json: 1 for single texts, 2 for pairs
HEAD = "classification/classifier/"  # beginning of the names of its weights
MOST_SHOWN = 12  # classes whose confusion is printed, too


def finetune(config, processes):
    """Train, score, predict and export as a `ClassifyConfig` says: `FinetuningResult`."""
    text = run.read_text_model(config, processes)
    run.check_export(config)
    read = functools.partial(
        read_examples,
        columns=config.columns,
        label_column=config.label_column,
        separator=config.label_separator,
    )
    # Files are read before training: a mistake in them would show after hours
    training = read(config.train_file) if config.do_train else None
    held_out = read(config.eval_file) if config.eval_file else None
    wanted = read(config.predict_file, has_labels=False) if config.predict_file else None
    problem = _find_problem(config, training, held_out)
    for examples in filter(None, (held_out, wanted)):
        check_num_texts(problem, len(examples.texts), examples.path)
    names = f": {len(problem.names)} labels, {', '.join(problem.names):.200}" if problem.names else ""
    print(f"labels     {problem.kind}{names}")
    labels = problem.numbers(training) if training else None
    weights = weights_of(config.class_weights, problem, labels) if training else None
    objective = {
        SINGLE: lambda: classes_objective(len(problem.names), weights),
        SEVERAL: lambda: several_objective(len(problem.names)),
        NUMBER: (lambda: several_objective(1)) if problem.is_chance else numbers_objective,
    }[problem.kind]()

    def predictor(examples, labels=None):
        return Predictor(config, problem, examples, _sequences_of(config, text, examples), labels)

    evaluated = predictor(held_out, problem.numbers(held_out)) if held_out else None
    asked = predictor(wanted) if wanted else evaluated

    def read_training():
        sequences = _sequences_of(config, text, training)
        # A chance is a label beside no others
        values = labels[:, None] if problem.is_chance else labels
        data = LabelledSequences(sequences, {LABELS.name: values}, classes=problem.names)
        inputs = {"train_file": source_files(config.train_file)}
        if config.early_stopping_patience:  # scores of another file do not compare
            inputs["eval_file"] = source_files(config.eval_file)
        return data, inputs

    def finish(model, folder):
        take_best(config, folder, model)
        for name in (PREDICTIONS_FILE, CONFUSION_FILE):  # an earlier call's would be taken for this one's
            (folder / name).unlink(missing_ok=True)
        found = evaluated.probabilities(model) if evaluated else None
        if evaluated:
            evaluated.write_confusion(found, folder)
        if asked:
            asked.write(found if asked is evaluated else asked.probabilities(model), folder)
        if config.do_train:
            _export(config, text, problem, model, folder)
        return evaluated.scores_of(found) if evaluated else {}

    during = None
    if evaluated:
        during = Evaluation.of(config, label_scores.NAMES[problem.kind], evaluated.score, config.eval_file)
    new_head = HEAD if training and not _has_head(config.init_checkpoint, problem) else ""
    return run.run_task(config, text, objective, read_training, finish, during, new_head)


def _asked_kind(config):
    if config.number_loss == BINARY:
        return NUMBER
    return SEVERAL if config.label_separator else config.problem_type


def _find_problem(config, training, held_out):
    """That of the training file; without training that of the model."""
    is_chance = config.number_loss == BINARY
    if training:
        problem = find_problem(training, _asked_kind(config))
        return dataclasses.replace(problem, is_chance=is_chance, num_texts=len(training.texts))
    several = held_out is not None and all(isinstance(label, tuple) for label in held_out.labels)
    kind = _asked_kind(config)
    problem = stored_problem(config.init_checkpoint, kind, SEVERAL if several else SINGLE)
    return dataclasses.replace(problem, is_chance=problem.is_chance or is_chance)


def check_num_texts(problem, number, source):
    """Raise `InputError` where a model that learned single texts is asked about pairs, or the reverse."""
    if problem.num_texts not in (None, number):
        names = {1: "single texts", 2: "pairs of texts"}
        rule = f"have {names[problem.num_texts]}, as the model was trained on"
        raise InputError(f"{source} must {rule}. Received: {names[number]}.")


def _has_head(init_checkpoint, problem):
    """False where the head of a start has other labels than those to learn, or another order of them."""
    if not init_checkpoint or stored_head(init_checkpoint)[0] != CLASSIFICATION:
        return True  # there is none to leave out
    _, num_outputs = stored_head(init_checkpoint)
    names = stored_labels(init_checkpoint)
    is_as_wide = num_outputs == max(len(problem.names), 1)
    return is_as_wide and (problem.kind == NUMBER or names in ((), problem.names))


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
    paths = [place / HUGGING_FACE_CONFIG for place in places if (place / HUGGING_FACE_CONFIG).is_file()]
    stored = read_json(paths[0]) if paths else {}
    kind = stored.get("problem_type") or (NUMBER if num_outputs == 1 else otherwise)
    kind = kind if asked == "auto" else asked
    if kind not in PROBLEMS:
        raise InputError(f"`problem_type` must be one of {', '.join(PROBLEMS)}. Received: {kind!r}.")
    num_texts = stored.get(NUM_TEXTS)
    if kind == NUMBER:
        activation = (stored.get("sentence_transformers") or {}).get("activation_fn")
        activation = activation or stored.get("sbert_ce_default_activation_function")
        return Problem(kind, (), activation == SIGMOID, num_texts)
    numbers = tuple(map(str, range(num_outputs)))
    names = stored_labels(init_checkpoint)
    # transformers names labels that have no names
    is_unnamed = names in ((), tuple(f"LABEL_{number}" for number in numbers))
    return Problem(kind, numbers if is_unnamed else names, num_texts=num_texts)


def _sequences_of(config, text, examples):
    sequences, num_cut = make_text_sequences(
        examples.texts, text.tokenizer, config.max_seq_length, examples.path
    )
    counts = describe_counts({"cut to max_seq_length": num_cut})
    print(f"{examples.path}: {count_of(len(examples), 'example')}{counts}", flush=True)
    return sequences


@dataclasses.dataclass
class Predictor:
    """Predictions and scores of a file by a model, whose program is compiled once."""

    config: ClassifyConfig
    problem: Problem
    examples: Examples
    sequences: Sequences
    labels: np.ndarray | None  # of `Problem.numbers`; None where there is nothing to score against
    _forward: Callable | None = None

    def probabilities(self, model):
        """See `scores.probabilities`."""
        if self._forward is None:
            self._forward = run.forward_of(model)
        outputs, _ = run.predict_packed(self.config, model, self.sequences, self._forward)
        return label_scores.probabilities(self.problem, np.stack(outputs["logits"]))

    def score(self, model):
        """Scores of a model times 100, dict of float."""
        return self.scores_of(self.probabilities(model))

    def scores_of(self, found):
        """Scores of `probabilities` times 100, dict of float."""
        scores = label_scores.score(self.problem, found, self.labels)
        return {name: 100 * value for name, value in scores.items()}

    def write_confusion(self, found, folder):
        """Write how often each class was predicted for each true one, and print it where they are few."""
        names = self.problem.names
        if self.problem.kind != SINGLE:
            return
        predicted = label_scores.decide(self.problem, found)
        table = label_scores.confusion(predicted, self.labels, len(names))
        write_json(folder / CONFUSION_FILE, {"labels": list(names), "true_by_predicted": table.tolist()})
        if len(names) <= MOST_SHOWN:
            print("\npredicted, a row for each true class")
            rows = zip(names, table.tolist(), strict=True)
            print_table([{"true": name, **dict(zip(names, row, strict=True))} for name, row in rows])

    def write(self, found, folder):
        """Write `predictions.tsv`: the prediction, then the probability of each label."""
        kind, names = self.problem.kind, self.problem.names
        separator = self.config.label_separator or ","
        lines = ["\t".join(["prediction", *names])]
        for row, decision in zip(found, label_scores.decide(self.problem, found), strict=True):
            shown = self.problem.shown(decision)
            shown = f"{shown:.6g}" if kind == NUMBER else shown
            shown = separator.join(shown) if kind == SEVERAL else shown
            lines.append("\t".join([shown, *(f"{value:.6g}" for value in row[: len(names)])]))
        write_text(str(folder / PREDICTIONS_FILE), "".join(f"{line}\n" for line in lines))
        print(f"predicted  {count_of(len(found), 'example')} of {self.examples.path}")


def _export(config, text, problem, model, folder):
    """Write `model/`."""
    more = {"problem_type": problem.kind, NUM_TEXTS: problem.num_texts}
    if problem.kind == NUMBER:
        more["sentence_transformers"] = {"activation_fn": SIGMOID if problem.is_chance else IDENTITY}
    details = {"classes": problem.names, "max_length": config.max_seq_length, "more": more}
    with run.exported_model(config, text, model, folder, **details) as partial:
        write_model_card(partial, model)
