"""Fine-tuning on SQuAD: objective, windows of texts, answers and their scores.

Legend: B packs per batch, S pack length, K sequences per pack.
"""

import functools

from keras import ops

from bert_packed.architectures.registry import QUESTION_ANSWERING
from bert_packed.core.progress import count_of
from bert_packed.core.settings import InputError
from bert_packed.layers.context import MASKED_SCORE
from bert_packed.objectives.features import SEQUENCES, Feature
from bert_packed.objectives.objective import Objective, count_sequences
from bert_packed.runs.run_summary import describe_counts
from bert_packed.tasks import run
from bert_packed.tasks.batches import LabelledSequences
from bert_packed.tasks.squad import predictions as squad_predictions
from bert_packed.tasks.squad import scores as squad_scores
from bert_packed.tasks.squad.files import read_squad
from bert_packed.tasks.squad.windows import make_windows

ANSWER_SPANS = (  # first and last token
    Feature("start_positions", "K", is_position=True),
    Feature("end_positions", "K", is_position=True),
)


def answers_objective():
    """Start and end of each sequence's answer, as indices into the pack."""
    return Objective(
        head=QUESTION_ANSWERING,
        features=(*SEQUENCES, *ANSWER_SPANS),
        outputs={"start_logits": "S", "end_logits": "S"},
        sums=answer_sums,
        counts=count_sequences,
        losses={"loss": "num_sequences"},
        accuracies={f"{name}_accuracy": (f"{name}_correct", "num_sequences") for name in ("start", "end")},
        skips_empty=True,
    )


def own_logits(logits_BS, sequence_ids_BS, num_slots):
    """Logits of each sequence's own tokens: float32 `[B, K, S]`. Softmax and gradient are exactly 0 at dots.

    logits        [5 3 1 4 2 9],  sequence_ids  [1 1 1 2 2 0]
    sequence 1    [5 3 1 . . .]
    sequence 2    [. . . 4 2 .]
    """
    slots_K = ops.arange(1, num_slots + 1, dtype="int32")
    belongs_BKS = ops.equal(ops.cast(sequence_ids_BS, "int32")[:, None, :], slots_K[None, :, None])
    # logits * mask would not do: a logit of 0 keeps a share of the softmax, and neighbours would leak in
    return ops.where(belongs_BKS, logits_BS[:, None, :], MASKED_SCORE)


def answer_sums(outputs, batch):
    """Sums of `answers_objective`; positions in `batch` are int32 `[B, K]`, 0 in unused slots."""
    weights_BK = batch["slot_weights"]
    sums, loss = {}, 0.0  # mean of the negative log-likelihoods of start and end, as in google-research/bert
    for name in ("start", "end"):
        logits_BS, positions_BK = outputs[f"{name}_logits"], batch[f"{name}_positions"]
        own_BKS = own_logits(logits_BS, batch["sequence_ids"], weights_BK.shape[1])
        chosen_BK = ops.take_along_axis(logits_BS, positions_BK, axis=1)
        nll_BK = ops.logsumexp(own_BKS, axis=-1) - chosen_BK
        right_BK = chosen_BK >= ops.max(own_BKS, axis=-1)
        # An unused slot has a huge loss, but a finite one: times 0 it is 0, and so is its gradient
        loss = loss + ops.sum(nll_BK * weights_BK) / 2
        sums[f"{name}_correct"] = ops.sum(ops.cast(right_BK, "float32") * weights_BK)
    return {"loss": loss, **sums, **count_sequences(batch)}


def finetune(config, processes):
    """Train, predict and score as a `SquadConfig` says: `FinetuningResult`."""
    config = config.resolved()
    if config.is_sample:
        raise InputError("`train_file` or `predict_file` must be given. Received: neither.")
    text = run.read_text_model(config, processes)

    def windows_of(path, for_training):
        questions = read_squad(path, for_training, config.version_2_with_negative, config.skip_bad_answers)
        sizes = (config.max_seq_length, config.doc_stride, config.max_query_length)
        windows = make_windows(questions, text.tokenizer, *sizes, path)
        print(_describe(path, questions, windows), flush=True)
        return questions, windows

    # Both files are read before training: a mistake in the second would show after hours
    held_out = windows_of(config.predict_file, False) if config.do_predict else None

    def read_training():
        _, windows = windows_of(config.train_file, True)
        names = tuple(feature.name for feature in ANSWER_SPANS)
        labels = dict(zip(names, windows.answer_spans.T, strict=True))
        return LabelledSequences(windows.sequences, labels, names), {"train_file": [config.train_file]}

    predict = functools.partial(_predict, config, *held_out) if held_out else None
    return run.run_task(config, text, answers_objective(), read_training, predict)


def _predict(config, questions, windows, model, folder):
    """Answer every question and write the answers; returns scores where the file has the right ones."""
    logits, num_packs = [], 0
    if len(windows.sequences):  # else no context has a word: every answer is ""
        outputs, num_packs = run.predict_packed(config, run.forward_of(model), windows.sequences)
        logits = list(zip(outputs["start_logits"], outputs["end_logits"], strict=True))
    predictions = squad_predictions.extract(
        questions,
        windows,
        logits,
        config.n_best_size,
        config.max_answer_length,
        config.version_2_with_negative,
        config.null_score_diff_threshold,
    )
    squad_predictions.write(folder, predictions)
    print(
        f"predicted  {count_of(len(predictions.answers), 'answer')} from "
        f"{count_of(len(logits), 'window')} in {count_of(num_packs, 'pack')}"
    )
    if not squad_scores.has_truths(questions.questions):
        return {}
    version_2 = config.version_2_with_negative or None
    for line in squad_scores.warnings_about(questions.questions, predictions.answers, version_2):
        print(f"  warning: {line}")
    return squad_scores.score(questions.questions, predictions.answers, version_2=version_2)


def _describe(path, questions, windows):
    """Lines about what a file gave, and what was left out or cut."""
    counts = {
        **questions.num_skipped,
        "questions whose context has no word": windows.num_empty,
        "questions cut to max_query_length": windows.num_truncated,
    }
    return (
        f"{path}: {len(questions.questions):,} questions, {len(questions.contexts):,} contexts, "
        f"{len(windows.windows):,} windows{describe_counts(counts)}"
    )
