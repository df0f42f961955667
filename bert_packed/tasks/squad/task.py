"""Fine-tuning on SQuAD: windows of texts, answer spans, answers and their scores."""

import functools

from bert_packed.core.progress import count_of
from bert_packed.core.settings import InputError
from bert_packed.training.engines import choose_backend


def finetune(config):
    """Train, predict and score as a `SquadConfig` says: `FinetuningResult`."""
    config = config.resolved()
    if config.is_sample:
        raise InputError("`train_file` or `predict_file` must be given. Received: neither.")
    choose_backend()
    # TensorFlow: not before the backend is chosen
    from bert_packed.tasks import run
    from bert_packed.tasks.squad.files import read_squad
    from bert_packed.tasks.squad.objective import answers_objective

    text = run.read_text_model(config)

    def windows_of(path, for_training):
        from bert_packed.tasks.squad.windows import make_windows

        questions = read_squad(path, for_training, config.version_2_with_negative, config.skip_bad_answers)
        sizes = (config.max_seq_length, config.doc_stride, config.max_query_length)
        windows = make_windows(questions, text.tokenizer, *sizes, path)
        print(_describe(path, questions, windows), flush=True)
        return questions, windows

    # Both files are read before training: a mistake in the second would show after hours
    held_out = windows_of(config.predict_file, False) if config.do_predict else None

    def read_training():
        _, windows = windows_of(config.train_file, True)
        return _training_data(windows), {"train_file": [config.train_file]}

    predict = functools.partial(_predict, config, *held_out) if held_out else None
    return run.run_task(config, text, answers_objective(), read_training, predict)


def _training_data(windows):
    from bert_packed.tasks.batches import LabelledSequences
    from bert_packed.tasks.squad.objective import ANSWER_SPANS

    names = tuple(feature.name for feature in ANSWER_SPANS)
    labels = {name: windows.answer_spans[:, column] for column, name in enumerate(names)}
    return LabelledSequences(windows.sequences, labels, names)


def _predict(config, questions, windows, model, folder):
    """Answer every question and write the answers; returns scores where the file has the right ones."""
    from bert_packed.tasks import run
    from bert_packed.tasks.squad import predictions as squad_predictions
    from bert_packed.tasks.squad import scores as squad_scores

    logits, num_packs = [], 0
    if len(windows.sequences):  # else no context has a word: every answer is ""
        outputs, num_packs = run.predict_packed(config, model, windows.sequences)
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
    from bert_packed.runs.run_summary import describe_counts

    counts = {
        **questions.num_skipped,
        "questions whose context has no word": windows.num_empty,
        "questions cut to max_query_length": windows.num_truncated,
    }
    return (
        f"{path}: {len(questions.questions):,} questions, {len(questions.contexts):,} contexts, "
        f"{len(windows.windows):,} windows{describe_counts(counts)}"
    )
