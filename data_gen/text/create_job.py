"""Creation of unpacked records from text: the steps of `create_steps.py`, in order, and the manifest."""

import hashlib
import logging
import os
import shutil
import time

import numpy as np
from tqdm import tqdm

from bert_packed.core import storage
from bert_packed.core.runtime import code_sha256, versions
from bert_packed.core.settings import InputError
from bert_packed.packing import histogram as histograms
from bert_packed.records.inputs import find_files, stamp_files, unchanged
from bert_packed.records.provenance import describe_path, provenance_path
from bert_packed.schema import CAUSAL_LM, MLM_NSP
from bert_packed.text.masking import masking_rules
from bert_packed.text.tokenization import ENCODE_CHARACTERS
from bert_packed.text.vocabularies import ByteBpe, WordPieces
from data_gen.jobs.output import open_output_dir, refuse_own_input
from data_gen.jobs.runners import TEXT_BYTES_THAT_PAY, check_runner, choose_num_workers
from data_gen.jobs.steps import Job, Step
from data_gen.text import create_steps
from data_gen.text.corpus import NAME, TextDocuments, join_lines, read_sample_documents
from data_gen.text.create_config import WORDPIECE
from data_gen.text.create_steps import Shard, Text, TokenizeWork
from data_gen.text.instances import InstanceRules
from data_gen.text.sources import Source, choose_readings, find_text_sources, save_readings, split_documents
from data_gen.text.text_records import BertRecords, CausalRecords

logger = logging.getLogger(__name__)


def create(config):
    """Make the unpacked records of a text, as a `CreateConfig` describes; returns the manifest.

    The records of each split, the vocabulary and `manifest.json` appear together. The same call continues a
    run that was killed. In the manifest, tokens count once per pass, and those cut are in no sequence of the
    pass, since a pair of sentences was over max_seq_length.
    """
    start = time.monotonic()
    check_runner(config.runner, config.num_workers)
    sources = find_text_sources(config.input_file) if config.input_file else []
    paths = sorted(path for source in sources for path in source.paths)
    refuse_own_input(paths, config.output_dir)
    records = make_records(config)
    vocab_file = _find_vocab_file(config, records)
    stamps, vocab_stamps = stamp_files(paths), stamp_files([vocab_file] if vocab_file else [])
    identity = {
        "settings": config.resolved(),
        "inputs": stamps,  # [] for the embedded corpus, which depends on the versions only
        "vocabulary": vocab_stamps,
        "versions": versions(),
        "code": code_sha256(),
    }
    with open_output_dir(config.output_dir, config.overwrite, identity) as output:
        manifest = output.manifest
        if manifest is None:
            inputs = _open_inputs(config, records, stamps)
            sources = sources or [Source(NAME, 1.0, (NAME,))]
            size = sum(text.size for text in inputs)
            num_workers = choose_num_workers(config.num_workers, size, TEXT_BYTES_THAT_PAY)
            with Job(output.work_folder, num_workers, config.runner) as job:
                manifest = _create_from(config, records, sources, inputs, vocab_stamps, output, job)
            output.write_manifest(manifest)
    splits = manifest["splits"].values()
    logger.info(
        "made %d sequences of %d documents in %.1f s; %s",
        *(sum(split[name] for split in splits) for name in ("num_sequences", "num_documents")),
        time.monotonic() - start,
        records.summarize(manifest),
    )
    for line in records.warnings_about(manifest):
        logger.warning("%s", line)
    return manifest


def make_records(config):
    if config.tokenizer == WORDPIECE:
        vocabulary = WordPieces(config.vocab_size, config.do_lower_case)
    else:
        vocabulary = ByteBpe(config.vocab_size, is_encoder=config.objective != CAUSAL_LM)
    if config.objective == CAUSAL_LM:
        return CausalRecords(vocabulary, config.max_seq_length)
    rules = InstanceRules(
        max_seq_length=config.max_seq_length,
        max_predictions_per_seq=config.num_prediction_slots,
        masked_lm_prob=config.masked_lm_prob,
        short_seq_prob=config.short_seq_prob if config.objective == MLM_NSP else 0.0,
        masking=masking_rules(config),
        next_sentences=config.objective == MLM_NSP,
    )
    return BertRecords(vocabulary, rules, config.dupe_factor)


def summarize(manifest):
    """Rows of the printed table: a dict for each split."""
    rows = []
    for split, content in manifest["splits"].items():
        num_tokens = int(np.dot(content["histogram"]["lengths"], content["histogram"]["counts"]))
        num_sequences = content["num_sequences"]
        row = {"split": split, "documents": content["num_documents"], "sequences": num_sequences}
        row |= {"tokens": num_tokens, "mean length": num_tokens / num_sequences}
        capacity = num_sequences * manifest["settings"]["max_seq_length"]
        rows.append(row | {"padding": 1 - num_tokens / capacity})
    return rows


def choose_documents(config, num_passes, sources_of, weights):
    """Choose the documents of each split: dict from split to ascending numbers, and readings, int64 `[d]`.

    `sources_of` has the source of each document, int `[number of documents]`.
    """
    splits = split_documents(len(sources_of), config.eval_fraction, config.random_seed)
    chosen = {split: (documents, np.ones_like(documents)) for split, documents in splits.items()}
    train = splits["train"]
    chosen["train"] = train, choose_readings(sources_of[train], weights, num_passes, config.random_seed)
    if not chosen["train"][1].any():
        raise InputError(
            f"`input_file` must have weights that leave a document. Received: {config.input_file}, "
            f"of {len(train)} documents."
        )
    return chosen


def cut_shards(config, records, chosen, output, corpus_dir):
    """Divide the (duplicate, document) pairs of each split among files: list of `Shard`."""
    num_pairs = {split: int(readings.sum()) for split, (_, readings) in chosen.items()}
    shards = []
    for split in chosen:
        # shards of all splits have about the same size
        num_shards = min(-(-config.num_shards * num_pairs[split] // num_pairs["train"]), num_pairs[split])
        for index in range(num_shards):
            path = output.path(f"{split}-{index:05d}-of-{num_shards:05d}.tfrecord")
            shards.append(
                Shard(
                    path=path,
                    provenance=provenance_path(path) if config.provenance else "",
                    corpus_dir=corpus_dir,
                    vocab_path=output.path(records.vocabulary.file_name),
                    split=split,
                    index=index,
                    first=num_pairs[split] * index // num_shards,
                    last=num_pairs[split] * (index + 1) // num_shards,
                    seed=config.random_seed,
                    records=records,
                )
            )
    return shards


def _create_from(config, records, sources, inputs, vocab_stamps, output, job):
    vocab_path = _make_vocabulary(config, records, vocab_stamps, inputs, output, job)
    corpus_dir, described_inputs = _make_corpus(config, records, inputs, vocab_path, output, job)
    owners = {path: index for index, source in enumerate(sources) for path in source.paths}
    sources_of = np.repeat(
        [owners[text.name] for text in inputs], [entry["num_documents"] for entry in described_inputs]
    )
    if not len(sources_of):
        raise InputError(f"`input_file` must hold a word. Received: {config.input_file}.")
    weights = [source.weight for source in sources]
    chosen = choose_documents(config, records.num_passes, sources_of, weights)
    for split, found in chosen.items():
        save_readings(corpus_dir, split, *found)
    shards = cut_shards(config, records, chosen, output, corpus_dir)
    steps = [
        Step(f"write-{i:06d}", create_steps.write_shard, s, s.last - s.first) for i, s in enumerate(shards)
    ]
    written = job.run(steps, "write", "documents")
    described = records.vocabulary.describe(vocab_path)
    objective = {"objective": config.objective, "tokenizer": config.tokenizer}
    return {
        "kind": "unpacked",
        **(objective if config.objective != MLM_NSP else {}),
        "settings": config.resolved(),
        "versions": versions(),
        "vocab_size": described.pop("vocab_size"),
        "vocab_sha256": storage.file_sha256(vocab_path),
        **described,
        "inputs": described_inputs,
        "sources": _describe_sources(sources, sources_of, chosen),
        "splits": {
            split: _describe_split(records, shards, written, split, int((readings > 0).sum()))
            for split, (_, readings) in chosen.items()
        },
    }


def _open_inputs(config, records, stamps):
    """List of `Text`, one per file, or the embedded corpus."""
    if stamps:
        return [_open_files(config, records, [stamp]) for stamp in stamps]
    documents = list(tqdm(read_sample_documents(), desc="sample corpus", unit=" documents", disable=None))
    text = "\n\n".join("\n".join(document) for document in documents)
    numbered = [(number, line) for number, document in enumerate(documents, 1) for line in document]
    if records.is_verbatim:
        numbered = list(join_lines(numbered, ENCODE_CHARACTERS))
    return [Text(NAME, numbered, [], len(text), hashlib.sha256(text.encode()).hexdigest())]


def _open_files(config, records, stamps):
    paths = tuple(path for path, *_ in stamps)
    documents = TextDocuments(paths, records.is_verbatim, config.text_column)
    return Text(",".join(paths), documents, stamps, sum(size for _, size, _ in stamps))


def _find_vocab_file(config, records):
    """Path of the config's vocabulary, checked before text is read, or ""."""
    if not config.vocab_file:
        return ""
    paths = find_files(config.vocab_file, "vocab_file")
    if len(paths) != 1:
        raise InputError(f"`vocab_file` must be one file. Received: {', '.join(paths)}.")
    refuse_own_input(paths, config.output_dir)
    records.vocabulary.check(paths[0])
    return paths[0]


def _make_vocabulary(config, records, vocab_stamps, inputs, output, job):
    """Copy or train the vocabulary; returns its path."""
    path = output.path(records.vocabulary.file_name)
    if vocab_stamps:
        with (
            unchanged(vocab_stamps),
            storage.open_file(vocab_stamps[0][0]) as source,
            storage.write_whole(path) as partial,
            storage.open_file(partial, "wb") as target,
        ):
            shutil.copyfileobj(source, target)
    else:
        stamps = [stamp for text in inputs for stamp in text.stamps]
        text = _open_files(config, records, stamps) if stamps else inputs[0]
        work = (records.vocabulary, text, path)
        step = Step("vocabulary", create_steps.train_vocabulary, work, 2 * text.size)  # it is read twice
        job.run([step], "train vocabulary", "B")
    return path


def _make_corpus(config, records, inputs, vocab_path, output, job):
    """Tokenize all inputs; returns the corpus's folder and the manifest's list of inputs."""
    steps, parts = [], []
    for index, text in enumerate(inputs):
        parts.append(os.path.join(output.work_folder, f"corpus-{index:06d}"))
        work = TokenizeWork(records, text, index, vocab_path, parts[-1])
        steps.append(Step(f"tokenize-{index:06d}", create_steps.tokenize, work, text.size))
    found = job.run(steps, "tokenize", "B")
    corpus_dir = os.path.join(output.work_folder, "corpus")

    def release(step):
        for part in parts:
            storage.remove_folder(part)

    job.run([Step("join", create_steps.join, (parts, records.layout, corpus_dir))], "join", release=release)
    described = [
        (describe_path(text.name, config.output_dir) if text.stamps else {"path": text.name}) | tokenized
        for text, tokenized in zip(inputs, found, strict=True)
    ]
    return corpus_dir, described


def _describe_sources(sources, sources_of, chosen):
    described = []
    for index, source in enumerate(sources):
        splits = {}
        for split, (documents, readings) in chosen.items():
            own = readings[sources_of[documents] == index]
            splits[split] = {"num_documents": int((own > 0).sum()), "num_readings": int(own.sum())}
        described.append(
            {
                "pattern": source.pattern,
                "weight": source.weight,
                "num_files": len(source.paths),
                "num_documents": int((sources_of == index).sum()),
                "splits": splits,
            }
        )
    return described


def _describe_split(records, shards, written, split, num_documents):
    """The manifest's entry of one split; raises `InputError` where it has no sequence."""
    results = [result for shard, result in zip(shards, written, strict=True) if shard.split == split]
    histogram = sum(np.array(result["histogram"]) for result in results)
    if not histogram.sum():
        raise InputError(f"`input_file` must hold two words or more. Received: none in split {split}.")
    counts = {name: sum(result["counts"][name] for result in results) for name in results[0]["counts"]}
    return {
        "num_documents": num_documents,
        "num_sequences": int(histogram.sum()),
        **counts,
        **records.describe(counts),
        "histogram": histograms.to_json(histogram),
        "files": [result["entry"] for result in results],
    }
