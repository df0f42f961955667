"""Command line: fine-tune a packed BERT on SQuAD, answer questions with it, score the answers."""

import dataclasses
import functools
import sys

from bert_packed.core.command_line import run
from bert_packed.runs.finetuning_config import SquadConfig
from bert_packed.training.engines import choose_backend

DESCRIPTION = """
Fine-tunes a packed BERT to find answers in texts, and answers questions: SQuAD v1.1 and v2.0.

OUTPUT_DIR receives checkpoints, metrics.csv, predictions.json, nbest_predictions.json, for v2.0
null_odds.json, and eval_results.json where PREDICT_FILE has the right answers. The same command continues a
stopped run. Every step takes train_batch_size sequences, the same ones whether they are packed or not
(--max_sequences_per_pack=1).

Without train_file and predict_file it learns a few questions about this project by heart:
--flagfile=squad.flags takes about two minutes on two cores.
"""


def main(config):
    """Train, predict and score; returns an exit status."""
    choose_backend()
    # TensorFlow: not for --help
    from bert_packed.objectives.finetuning import answers_objective
    from bert_packed.runs import finetuning
    from bert_packed.tasks.squad import read_squad

    config = config.resolved()
    if config.is_sample:
        from data_gen.sample_questions import QUESTIONS_FILE, build_missing

        # A checkpoint's ids mean the WordPieces of the vocabulary beside it
        own_vocab = "" if config.vocab_file or config.init_checkpoint else build_missing(config.do_lower_case)
        config = dataclasses.replace(
            config,
            train_file=str(QUESTIONS_FILE),
            predict_file=str(QUESTIONS_FILE),
            vocab_file=config.vocab_file or own_vocab,
            bert_config_file=config.bert_config_file or ("" if config.init_checkpoint else "bert-tiny"),
        )
    text = finetuning.read_text_model(config)

    def windows_of(path, for_training):
        from bert_packed.tasks.squad_windows import make_windows

        questions = read_squad(path, for_training, config.version_2_with_negative, config.skip_bad_answers)
        sizes = (config.max_seq_length, config.doc_stride, config.max_query_length)
        windows = make_windows(questions, text.tokenizer, text.vocabulary, *sizes, path)
        print(_describe(path, questions, windows), flush=True)
        return questions, windows

    # Both files are read before training: a mistake in the second would show after hours
    held_out = windows_of(config.predict_file, False) if config.do_predict else None

    def read_training():
        _, windows = windows_of(config.train_file, True)
        return _training_data(windows), {"train_file": [config.train_file]}

    predict = functools.partial(_predict, config, *held_out) if held_out else None
    return finetuning.run_task(config, text, answers_objective(), read_training, predict)


def _training_data(windows):
    from bert_packed.data.finetuning_batches import LabelledSequences
    from bert_packed.objectives.finetuning import ANSWER_SPANS

    names = tuple(feature.name for feature in ANSWER_SPANS)
    labels = {name: windows.answer_spans[:, column] for column, name in enumerate(names)}
    return LabelledSequences(windows.sequences, labels, names)


def _predict(config, questions, windows, model, folder):
    """Answer every question and write the answers; returns scores where the file has the right ones."""
    from bert_packed.evaluation import squad_predictions, squad_scores
    from bert_packed.runs import finetuning

    logits, num_packs = [], 0
    if len(windows.sequences):  # else no context has a word: every answer is ""
        outputs, num_packs = finetuning.predict_packed(config, model, windows.sequences)
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
    counts = f"{len(predictions.answers):,} answers from {len(logits):,} windows in {num_packs:,} packs"
    print(f"predicted  {counts}")
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


def command():
    """Run `main` with the flags of the command line; returns the exit status."""
    return run(main, SquadConfig, DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
