"""Training of vectors that compare: sequences of texts, scores while it trains, and the export.

Legend: B packs per batch, K sequences per pack, N rows of a step, R texts of a row, D model width.
"""

import functools
import itertools
from pathlib import Path

import numpy as np

from bert_packed.checkpoints.sentence_transformers import VectorSettings, write_settings
from bert_packed.core.hub import name_of
from bert_packed.core.progress import count_of
from bert_packed.core.settings import InputError
from bert_packed.runs.exports import CARD_FILE, origins
from bert_packed.runs.run_summary import describe_counts
from bert_packed.runs.vocabulary import find_vector_settings
from bert_packed.tasks import run
from bert_packed.tasks.batches import LabelledSequences
from bert_packed.tasks.embed.files import read_rows
from bert_packed.tasks.embed.losses import COSENT, RANKING, LossSettings, embedding_objective
from bert_packed.tasks.embed.scores import read_evaluation
from bert_packed.tasks.evaluation import Evaluation
from bert_packed.tasks.rows import make_text_sequences, source_files
from bert_packed.text.vocabularies import lowers_case
from bert_packed.training.backend import compiled

PREFIXES = ("query_prefix", "passage_prefix")
QUERY, PASSAGE, DOCUMENT = "query", "passage", "document"  # names of prompts


def finetune(config, processes):
    """Train, score and export as an `EmbedConfig` says: `FinetuningResult`."""
    text = run.read_text_model(config, processes)
    width = text.config.hidden_size
    if config.widths and config.widths[0] > width:
        raise InputError(
            f"`matryoshka_widths` must be at most hidden_size={width}. Received: {config.matryoshka_widths}."
        )
    run.check_export(config)
    settings = vector_settings(config, text)
    # Files are read before training: a mistake in them would show after hours
    rows = read_rows(config.train_file, config.columns, config.score_column) if config.do_train else None
    for name in PREFIXES:
        if rows and rows.scores is not None and getattr(config, name):
            rule = "be left out for pairs with scores, of which neither text is a query"
            raise InputError(f"`{name}` must {rule}. Received: {getattr(config, name)!r}.")
    if rows and rows.texts[0] is rows.texts[1] and not _has_dropout(text.config):
        raise InputError(
            "`hidden_dropout_prob` must be above 0 for texts alone, as two vectors of a text would be equal. "
            "Received: a model without dropout."
        )
    evaluation = read_evaluation(config.eval_file) if config.eval_file else None
    if evaluation:
        print(f"evaluation {evaluation.description}")
    objective = embedding_objective(loss_settings(config, rows, settings))
    encode = make_encoder(config, text, objective, settings)

    def read_training():
        data = training_data(config, rows, text.tokenizer, settings)
        return data, {"train_file": source_files(config.train_file)}

    def score(model, folder=None):
        return evaluation.score(functools.partial(encode, model)) if evaluation else {}

    during = evaluation and Evaluation(config, evaluation.names, score, evaluation.files)
    export = functools.partial(_export, config, text, settings, evaluation)
    return run.run_task(config, text, objective, read_training, score, during, export)


def vector_settings(config, text):
    """The `VectorSettings` of a run: as its flags say, else as the folder that it starts from."""
    is_lower = lowers_case(text.vocab_path, config.do_lower_case)
    stored = find_vector_settings(config.init_checkpoint, is_lower) or VectorSettings()
    if stored.default_prompt:
        rule = "have no default_prompt_name, as texts are trained without"
        raise InputError(f"`init_checkpoint` must {rule}. Received: {stored.default_prompt!r}.")
    length = min(config.max_seq_length, text.config.max_position_embeddings)
    if stored.max_seq_length not in (None, length):
        print(f"length     {length} tokens (max_seq_length); of init_checkpoint {stored.max_seq_length}")
    prompts = {
        **stored.prompts,
        QUERY: config.query_prefix or stored.prompts.get(QUERY, ""),
        PASSAGE: config.passage_prefix or stored.prompts.get(PASSAGE, stored.prompts.get(DOCUMENT, "")),
    }
    prompts[DOCUMENT] = prompts[PASSAGE]  # as `encode_document` of sentence-transformers names it
    return VectorSettings(
        stored.pooling if config.pooling == "auto" else config.pooling,
        config.normalize,
        {name: prefix for name, prefix in prompts.items() if prefix},
        length,
    )


def _has_dropout(model_config):
    return any(getattr(model_config, name) > 0 for names in model_config.dropout_fields for name in names)


def loss_settings(config, rows, settings):
    """The `LossSettings` of rows; None for those of a model that is not trained."""
    kind = config.loss
    has_scores = rows is not None and rows.scores is not None
    if kind == "auto":
        kind = COSENT if has_scores else RANKING
    if rows is not None and (kind == COSENT) != has_scores:
        rule = "have a score of each pair" if kind == COSENT else "have no scores"
        received = "some" if has_scores else "none"
        raise InputError(f"{rows.path} must {rule} for loss={kind}. Received: {received}.")
    return LossSettings(
        kind,
        config.train_batch_size,
        len(rows.texts) if rows else 2,
        settings.pooling,
        config.normalize,
        config.temperature,
        config.both_directions,
        config.widths,
    )


def training_data(config, rows, tokenizer, settings):
    """`LabelledSequences` of all texts, row by row."""
    num_texts, has_scores = len(rows.texts), rows.scores is not None
    prompts = [settings.prompts.get(name, "") for name in (QUERY, *[PASSAGE] * (num_texts - 1))]
    prompts = [""] * num_texts if has_scores else prompts  # neither text of a pair is a query
    plain = [text for row in zip(*rows.texts, strict=True) for text in row]
    texts = [prompt + text for prompt, text in zip(itertools.cycle(prompts), plain, strict=False)]
    sequences, num_cut = make_text_sequences([texts], tokenizer, config.max_seq_length, rows.path)
    # Texts are compared as the model reads them: two that differ in case alone may be one
    read = [tuple(ids[: config.max_seq_length]) for ids in tokenizer.encode(plain)]
    numbers = {ids: number for number, ids in enumerate(dict.fromkeys(read), 1)}
    labels = {"text_ids": np.array([numbers[ids] for ids in read], np.int32)}
    if has_scores:
        labels["scores"] = np.repeat(rows.scores, num_texts)
    # Texts alone are there twice by intention
    num_known = len(numbers) * (2 if rows.texts[0] is rows.texts[1] else 1)
    counts = {"cut to max_seq_length": num_cut, "texts that are there again": len(plain) - num_known}
    rows_of = f"{count_of(len(rows), 'row')} of {num_texts} texts"
    print(f"{rows.path}: {rows_of}{describe_counts(counts)}", flush=True)
    return LabelledSequences(sequences, labels, texts_per_row=num_texts)


def make_encoder(config, text, objective, settings):
    """A function from a model, texts and `is_query` to vectors, float32 `[n, D]`.

    `is_query` chooses the prompt, None for none. Its program is compiled once for each set of texts.
    """

    @functools.cache
    def forward_of(model):
        return compiled(
            lambda batch: {"vectors": objective.vectors(model(batch, training=False), batch)}, model
        )

    def encode(model, texts, is_query):
        prompt = settings.prompts.get({True: QUERY, False: PASSAGE}.get(is_query), "")
        texts = [prompt + one for one in texts]
        sequences, _ = make_text_sequences([texts], text.tokenizer, config.max_seq_length)
        outputs, _ = run.predict_packed(config, forward_of(model), sequences)
        return np.stack(outputs["vectors"])

    return encode


def _export(config, text, settings, evaluation, model, folder, scores):
    """Write `model/`, a folder of sentence-transformers, whole or not at all."""
    width = text.config.hidden_size
    length = settings.max_seq_length
    with run.exported_model(config, text, model, folder, max_length=length) as partial:
        write_settings(partial, settings, width)
        card = _card(config, settings, width, scores, evaluation)
        (Path(partial) / CARD_FILE).write_text(card, encoding="utf-8")


def _card(config, settings, width, scores, evaluation):
    """The text of the model card, whose front matter the hub reads."""
    names = "sentence-transformers", "sentence-similarity", "feature-extraction", "sequence-packing"
    lines = ["---", "library_name: sentence-transformers", "pipeline_tag: sentence-similarity", "tags:"]
    start = name_of(config.init_checkpoint)
    lines += [*(f"- {name}" for name in names), *origins(start, [config.train_file]), "---", ""]
    lines += [
        "# Vectors of texts",
        "",
        "```python",
        "from sentence_transformers import SentenceTransformer",
        'model = SentenceTransformer("FOLDER_OR_NAME")',
        'vectors = model.encode(["a text"])',
        "```",
        "",
        f"- dimensions: {width}" + (f", and {config.matryoshka_widths}" if config.widths else ""),
        f"- most tokens of a text: {settings.max_seq_length}",
        f"- pooling: {settings.pooling}; {'length 1' if settings.normalize else 'any length'}",
        f"- base model: {start or config.bert_config_file}",
        f"- data: {config.train_file if config.do_train else 'none: not trained here'}",
        *(f"- prompt {name}: {prefix!r}" for name, prefix in settings.prompts.items()),
        "",
        "## Scores",
        "",
        *([f"On {evaluation.description}:", ""] if scores else ["Not known."]),
        *(f"- {name}: {value:.2f}" for name, value in scores.items()),
    ]
    return "\n".join(lines) + "\n"
