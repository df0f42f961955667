"""How text becomes files of unpacked records: read, tokenize, split, and write shards in parallel.

A split's (duplicate, document) pairs are shuffled by the seed and cut into shards. A shard's bytes follow
from the corpus, its pairs and the seed alone, whoever writes it.
"""

import dataclasses
import hashlib
import multiprocessing
import os
import shutil
import signal
from concurrent import futures
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_gen import records, tokenization
from data_gen.corpus import TextDocuments
from data_gen.example_bytes import serialize_examples
from data_gen.input_files import find_files
from data_gen.instances import InstanceRules, make_instances, to_features
from data_gen.output import open_output_dir, refuse_own_input
from data_gen.packing import histogram as histograms
from data_gen.sample_corpus import NAME, read_sample_documents
from data_gen.sequences import take
from data_gen.settings import InputError
from data_gen.token_corpus import encode_documents, open_corpus

SPLITS = ("train", "eval")
VOCAB_NAME = "vocab.txt"
WRITE_BATCH = 1024  # sequences encoded at once; 1024 of S=512 take about 12 MB

# Fifth number of a random key. Documents draw from keys of four, so these never meet theirs.
SHUFFLE_SHARD, SHUFFLE_PAIRS, CHOOSE_EVAL = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file to write, described so that any process can.

    Attributes:
        path: Where to.
        corpus_dir: Folder with the `TokenCorpus` and the arrays of the split.
        vocab_path: Vocabulary.
        split: Name of the split.
        index: Number of the shard within its split.
        first, last: The shard's range of the split's pairs.
        seed: The run's seed.
        rules: `InstanceRules`.
    """

    path: str
    corpus_dir: str
    vocab_path: str
    split: str
    index: int
    first: int
    last: int
    seed: int
    rules: InstanceRules


def create(config):
    """Make the unpacked records of a text.

    `config.output_dir` receives `train-00000-of-0000N.tfrecord`, ..., with `eval_fraction` the same for
    `eval`, `vocab.txt` and `manifest.json`: all or none.

    Args:
        config: `CreateConfig`.

    Returns:
        The manifest, a dict:
            kind: "unpacked".
            settings: Dict of the settings that the records depend on.
            vocab_size, vocab_sha256, do_lower_case: Which vocabulary, and how it is applied.
            inputs: List of {name, sha256}.
            splits: Dict from "train" and, where asked for, "eval" to {num_documents, num_sequences,
                histogram, files: list of {name, num_records, sha256}}.

    Raises:
        InputError: an input cannot be used, or the output directory is in use.
    """
    paths = find_files(config.input_file, "input_file") if config.input_file else []
    refuse_own_input(paths, config.output_dir)
    vocab_file = _find_vocab_file(config)
    with open_output_dir(config.output_dir, config.overwrite) as output:
        documents, inputs = _open_documents(paths)
        vocab_path = output.path(VOCAB_NAME)
        if vocab_file:
            shutil.copyfile(vocab_file, vocab_path)
        else:
            vocabulary = tokenization.train_vocab(documents, config.vocab_size, config.do_lower_case)
            tokenization.save_vocab(vocabulary, vocab_path)
        vocabulary = tokenization.load_vocab(vocab_path)
        corpus_dir = output.path("corpus")
        os.mkdir(corpus_dir)
        tokenizer = tokenization.make_tokenizer(vocabulary, config.do_lower_case)
        progress = tqdm(documents, desc="tokenize", unit=" documents", disable=None)
        corpus = encode_documents(progress, tokenizer, corpus_dir)
        if not corpus.num_documents:
            raise InputError(f"`input_file` must hold a word. Received: {config.input_file}.")
        shards, num_documents = plan_shards(config, corpus.num_documents, output, corpus_dir)
        written = _write_shards(shards, config.num_workers)
        shutil.rmtree(corpus_dir)
        splits = {}
        for split in num_documents:
            splits[split] = _describe_split(shards, written, split, num_documents[split])
        manifest = {
            "kind": "unpacked",
            "settings": config.resolved(),
            "vocab_size": len(vocabulary),
            "vocab_sha256": records.file_sha256(vocab_path),
            "do_lower_case": config.do_lower_case,
            "inputs": inputs,
            "splits": splits,
        }
        output.write_manifest(manifest)
    return manifest


def summarize(manifest):
    """The rows of the printed table: one dict a split."""
    rows = []
    for split, content in manifest["splits"].items():
        histogram = content["histogram"]
        num_tokens = int(np.dot(histogram["lengths"], histogram["counts"]))
        num_sequences = content["num_sequences"]
        max_seq_length = manifest["settings"]["max_seq_length"]
        rows.append(
            {
                "split": split,
                "documents": content["num_documents"],
                "sequences": num_sequences,
                "tokens": num_tokens,
                "mean length": num_tokens / num_sequences,
                "padding": 1 - num_tokens / (num_sequences * max_seq_length),
            }
        )
    return rows


def split_documents(num_documents, eval_fraction, seed):
    """Choose the documents of each split.

    Returns:
        Dict from split to int64 array of document numbers, ascending: "train", and "eval" where
        `eval_fraction` is not 0.

    Raises:
        InputError: there is one document, and both splits need one.
    """
    if not eval_fraction:
        return {"train": np.arange(num_documents)}
    if num_documents < 2:
        raise InputError(f"`eval_fraction` must be 0 for a text of one document. Received: {eval_fraction}.")
    num_eval = max(1, round(num_documents * eval_fraction))
    order = np.random.default_rng((seed, 0, 0, 0, CHOOSE_EVAL)).permutation(num_documents)
    return {"train": np.sort(order[num_eval:]), "eval": np.sort(order[:num_eval])}


def plan_shards(config, num_documents, output, corpus_dir):
    """Cut each split's pairs into shards, and leave the pairs and documents beside the corpus.

    Returns:
        List of `Shard`, and dict from split to its number of documents.
    """
    splits = split_documents(num_documents, config.eval_fraction, config.random_seed)
    rules = InstanceRules(
        max_seq_length=config.max_seq_length,
        max_predictions_per_seq=config.num_prediction_slots,
        masked_lm_prob=config.masked_lm_prob,
        short_seq_prob=config.short_seq_prob,
        do_whole_word_mask=config.do_whole_word_mask,
    )
    shards = []
    num_train_pairs = len(splits["train"]) * config.dupe_factor
    for split, documents in splits.items():
        num_duplicates = config.dupe_factor if split == "train" else 1
        pairs = np.stack(np.meshgrid(np.arange(num_duplicates), documents, indexing="ij"), -1).reshape(-1, 2)
        key = (config.random_seed, SPLITS.index(split), 0, 0, SHUFFLE_PAIRS)
        pairs = np.random.default_rng(key).permutation(pairs)
        np.save(_pairs_path(corpus_dir, split), pairs)
        np.save(_documents_path(corpus_dir, split), documents)
        # shards of the splits are about equally large
        wanted = -(-config.num_shards * len(pairs) // num_train_pairs)
        num_shards = min(wanted, len(pairs))
        bounds = np.arange(num_shards + 1) * len(pairs) // num_shards
        for index in range(num_shards):
            name = f"{split}-{index:05d}-of-{num_shards:05d}.tfrecord"
            shards.append(
                Shard(
                    path=output.path(name),
                    corpus_dir=corpus_dir,
                    vocab_path=output.path(VOCAB_NAME),
                    split=split,
                    index=index,
                    first=int(bounds[index]),
                    last=int(bounds[index + 1]),
                    seed=config.random_seed,
                    rules=rules,
                )
            )
    return shards, {split: len(documents) for split, documents in splits.items()}


def write_shard(shard):
    """Make the sequences of a shard, shuffle them, and write its file.

    Returns:
        `FileEntry`, and the histogram of the lengths, int64 `[S]`.
    """
    corpus = open_corpus(shard.corpus_dir)
    pairs = np.load(_pairs_path(shard.corpus_dir, shard.split), mmap_mode="r")[shard.first : shard.last]
    documents = np.load(_documents_path(shard.corpus_dir, shard.split))
    vocabulary = tokenization.load_vocab(shard.vocab_path)
    rules, split_index = shard.rules, SPLITS.index(shard.split)
    sequences = make_instances(corpus, pairs, documents, vocabulary, rules, shard.seed, split_index)
    key = (shard.seed, split_index, 0, shard.index, SHUFFLE_SHARD)
    order = np.random.default_rng(key).permutation(len(sequences))

    def serialize():
        for start in range(0, len(order), WRITE_BATCH):
            batch = take(sequences, order[start : start + WRITE_BATCH])
            features = to_features(batch, rules.max_seq_length, rules.max_predictions_per_seq)
            yield from serialize_examples(features)

    entry = records.write_records(shard.path, serialize())
    return entry, histograms.count_lengths(sequences.lengths, rules.max_seq_length)


def _find_vocab_file(config):
    """Path of the vocabulary that the config names, or "". A mistake in it shows before text is read."""
    if not config.vocab_file:
        return ""
    paths = find_files(config.vocab_file, "vocab_file")
    if len(paths) != 1:
        raise InputError(f"`vocab_file` must be one file. Received: {', '.join(paths)}.")
    refuse_own_input(paths, config.output_dir)
    tokenization.load_vocab(paths[0])
    return paths[0]


def _open_documents(paths):
    """The documents, which can be iterated again, and the manifest's list of inputs."""
    if paths:
        inputs = [{"name": os.path.basename(path), "sha256": records.file_sha256(path)} for path in paths]
        return TextDocuments(tuple(paths)), inputs
    progress = tqdm(read_sample_documents(), desc="sample corpus", unit=" documents", disable=None)
    documents = list(progress)  # some megabytes, and parsing again would take longer than all the rest
    text = "\n\n".join("\n".join(document) for document in documents)
    return documents, [{"name": NAME, "sha256": hashlib.sha256(text.encode()).hexdigest()}]


def _write_shards(shards, num_workers):
    """Write all shards: list of the results of `write_shard`, in their order."""
    num_workers = min(num_workers or _num_cores(), len(shards))
    total = sum(shard.last - shard.first for shard in shards)
    with tqdm(total=total, desc="write", unit=" documents", disable=None) as progress:
        if num_workers == 1:
            return [_advance(progress, shard, write_shard(shard)) for shard in shards]
        # Spawned, not forked: TensorFlow's and the tokenizer's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        with futures.ProcessPoolExecutor(num_workers, context, _ignore_interrupt) as pool:
            running = {pool.submit(write_shard, shard): shard for shard in shards}
            try:
                for future in futures.as_completed(running):
                    _advance(progress, running[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [future.result() for future in running]


def _num_cores():
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _advance(progress, shard, result):
    progress.update(shard.last - shard.first)
    return result


def _ignore_interrupt():
    """A worker leaves Ctrl-C to the parent, which reports it once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _describe_split(shards, written, split, num_documents):
    """The manifest's entry of one split; raises `InputError` where it has no sequence."""
    results = [result for shard, result in zip(shards, written, strict=True) if shard.split == split]
    histogram = sum(counts for _, counts in results)
    if not histogram.sum():
        raise InputError(f"`input_file` must hold two words or more. Received: none in split {split}.")
    return {
        "num_documents": num_documents,
        "num_sequences": int(histogram.sum()),
        "histogram": histograms.to_json(histogram),
        "files": [entry.to_json() for entry, _ in results],
    }


def _pairs_path(corpus_dir, split):
    return Path(corpus_dir, f"{split}_pairs.npy")


def _documents_path(corpus_dir, split):
    return Path(corpus_dir, f"{split}_documents.npy")
