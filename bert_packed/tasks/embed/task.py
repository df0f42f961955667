"""Training of vectors that compare: sequences of texts, scores while it trains, and the export.

Legend: B packs per batch, K sequences per pack, N rows of a step, R texts of a row, D model width.
"""

import dataclasses
import functools
import itertools
from pathlib import Path

import numpy as np

from bert_packed.assembly.update_packs import pack_all
from bert_packed.checkpoints import checkpoint
from bert_packed.checkpoints.export_formats import write_hugging_face
from bert_packed.checkpoints.sentence_transformers import VectorSettings, write_settings
from bert_packed.core.progress import count_of
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json, write_folder
from bert_packed.runs.exports import CARD_FILE
from bert_packed.runs.run_summary import describe_counts
from bert_packed.tasks import run
from bert_packed.tasks.batches import LabelledSequences, predict
from bert_packed.tasks.embed.files import read_rows
from bert_packed.tasks.embed.losses import COSENT, RANKING, LossSettings, embedding_objective
from bert_packed.tasks.embed.scores import read_evaluation
from bert_packed.tasks.glue.files import make_glue_sequences
from bert_packed.training.backend import compiled, out_of_memory_names
from bert_packed.training.engines.engine import named_weights

MODEL_FOLDER = "model"
QUERY, PASSAGE = "query", "passage"  # names of prompts


def finetune(config):
    """Train, score and export as an `EmbedConfig` says: `FinetuningResult`."""
    text = run.read_text_model(config)
    width = text.config.hidden_size
    if config.widths and config.widths[0] > width:
        raise InputError(
            f"`matryoshka_widths` must be at most hidden_size={width}. Received: {config.matryoshka_widths}."
        )
    # Files are read before training: a mistake in them would show after hours
    rows = read_rows(config.train_file, config.columns, config.score_column) if config.do_train else None
    asked = read_evaluation(config.eval_file) if config.eval_file else None
    settings = loss_settings(config, rows)
    objective = embedding_objective(settings)
    encoder = Encoder(config, text, objective)

    def read_training():
        return training_data(config, rows, text.tokenizer), {"train_file": _files(config.train_file)}

    def evaluate(model):
        return asked.score(functools.partial(encoder.encode, model))

    def finish(model, folder):
        scores = evaluate(model) if asked else {}
        if best := run.best_folder(folder) if config.keep_best else None:
            checkpoint.assign_tensors(best, checkpoint.read_weights(best), named_weights(model))
            scores = read_json(best / run.SCORES_OF_BEST)
        _export(config, text, model, folder, scores)
        return scores

    during = run.Evaluation(asked.names, evaluate, config.eval_steps, config.keep_best) if asked else None
    return run.run_task(config, text, objective, read_training, finish, during)


def loss_settings(config, rows):
    kind = config.loss
    has_scores = rows is not None and rows.scores is not None
    if kind == "auto":
        kind = COSENT if has_scores else RANKING
    if rows is not None and (kind == COSENT) != has_scores:
        rule = "have a score of each pair" if kind == COSENT else "have no scores"
        raise InputError(
            f"{rows.path} must {rule} for loss={kind}. Received: {'some' if has_scores else 'none'}."
        )
    return LossSettings(
        kind,
        config.train_batch_size,
        len(rows.texts) if rows else 2,
        config.pooling,
        config.normalize,
        config.temperature,
        config.both_directions,
        config.widths,
    )


def training_data(config, rows, tokenizer):
    """`LabelledSequences` of all texts, row by row."""
    num_texts, has_scores = len(rows.texts), rows.scores is not None
    prefixes = [config.query_prefix, *[config.passage_prefix] * (num_texts - 1)]
    prefixes = [""] * num_texts if has_scores else prefixes
    plain = [text for row in zip(*rows.texts, strict=True) for text in row]
    texts = [prefix + text for prefix, text in zip(itertools.cycle(prefixes), plain, strict=False)]
    sequences, num_cut = make_glue_sequences([texts], tokenizer, config.max_seq_length, rows.path)
    numbers = {text: number for number, text in enumerate(dict.fromkeys(plain), 1)}
    labels = {"text_ids": np.array([numbers[text] for text in plain], np.int32)}
    if has_scores:
        labels["scores"] = np.repeat(rows.scores, num_texts)
    # Texts alone are there twice by intention
    num_known = len(numbers) * (2 if rows.texts[0] is rows.texts[1] else 1)
    counts = {"cut to max_seq_length": num_cut, "texts that are there again": len(plain) - num_known}
    rows_of = f"{count_of(len(rows), 'row')} of {num_texts} texts"
    print(f"{rows.path}: {rows_of}{describe_counts(counts)}", flush=True)
    return LabelledSequences(sequences, labels, texts_per_row=num_texts)


def _files(path):
    folder = Path(path)
    return [str(file) for file in sorted(folder.glob("*.arrow"))] if folder.is_dir() else [path]


@dataclasses.dataclass
class Encoder:
    """Vectors of texts by a model in training; its program is compiled once for each set of texts."""

    config: object
    text: run.TextModel
    objective: object
    _forward: object = None

    def encode(self, model, texts, is_query):
        """Vectors of texts, float32 `[n, D]`; `is_query` chooses the prefix, None for none."""
        config = self.config
        prefix = {True: config.query_prefix, False: config.passage_prefix, None: ""}[is_query]
        sequences, _ = make_glue_sequences(
            [[prefix + text for text in texts]], self.text.tokenizer, config.max_seq_length
        )
        packs, spec = pack_all(
            sequences["lengths"],
            config.max_seq_length,
            config.max_sequences_per_pack,
            config.packing_algorithm,
        )
        if self._forward is None:
            vectors = self.objective.vectors
            self._forward = compiled(
                lambda batch: {"vectors": vectors(model(batch, training=False), batch)}, model
            )
        with out_of_memory_names("prediction", "predict_batch_size"):
            found = predict(self._forward, sequences, packs, spec, config.predict_batch_size)
        return np.stack(found["vectors"])


def _export(config, text, model, folder, scores):
    """Write `model/`, a folder of sentence-transformers, whole or not at all."""
    prompts = {QUERY: config.query_prefix, PASSAGE: config.passage_prefix}
    if prompts[PASSAGE]:
        prompts["document"] = prompts[PASSAGE]  # as `encode_document` of sentence-transformers names it
    prompts = {name: prefix for name, prefix in prompts.items() if prefix}
    length = min(config.max_seq_length, text.config.max_position_embeddings)
    settings = VectorSettings(config.pooling, config.normalize, prompts, length)
    width = text.config.hidden_size
    with write_folder(folder / MODEL_FOLDER) as partial:
        write_hugging_face(
            partial,
            model,
            named_weights(model),
            vocab_file=str(text.vocab_path),
            do_lower_case=config.do_lower_case,
            max_length=length,
        )
        write_settings(partial, settings, width)
        card = _card(config, settings, width, scores)
        (Path(partial) / CARD_FILE).write_text(card, encoding="utf-8")
    print(f"wrote {folder / MODEL_FOLDER}")


def _card(config, settings, width, scores):
    """The text of the model card, whose front matter the hub reads."""
    names = "sentence-transformers", "sentence-similarity", "feature-extraction", "sequence-packing"
    lines = ["---", "library_name: sentence-transformers", "pipeline_tag: sentence-similarity", "tags:"]
    lines += [*(f"- {name}" for name in names), "---", "", "# Vectors of texts", ""]
    lines += [
        f"- dimensions: {width}" + (f", and {config.matryoshka_widths}" if config.widths else ""),
        f"- most tokens of a text: {settings.max_seq_length}",
        f"- pooling: {settings.pooling}; {'length 1' if settings.normalize else 'any length'}",
        f"- base model: {config.init_checkpoint or config.bert_config_file}",
        f"- data: {config.train_file or 'none: not trained here'}",
        *(f"- prompt {name}: {prefix!r}" for name, prefix in settings.prompts.items()),
        "",
        "## Scores",
        "",
        *([f"On {config.eval_file}:", ""] if scores else ["Not known."]),
        *(f"- {name}: {value:.2f}" for name, value in scores.items()),
    ]
    return "\n".join(lines) + "\n"
