"""Masked language models by `transformers.Trainer`, packed, against padded batches.

python -m benchmarks.masked_lm_trainer --input_file=enwik8_sentences.txt.gz
"""

import dataclasses
import random
import sys

from benchmarks.runner import Settings, parse_names, show
from benchmarks.trainer import ONE_PLAN, PACKED, PADDED, SORTED, make_trainer, way_rows
from benchmarks.wikipedia_topics import read_articles
from bert_packed.core.command_line import run
from bert_packed.core.settings import setting
from bert_packed.runs.interleaved_timing import time_interleaved

MODELS = ("bert", "modernbert")


def parse_models(text):
    """Check the names of models."""
    return parse_names(text, MODELS)


@dataclasses.dataclass(frozen=True)
class MaskedLmConfig(Settings):
    """Interleaved epochs of Trainer over passages of Wikipedia, by small models with random weights: packed,
    batch by batch and by one plan, padded to the longest of each batch by DataCollatorForLanguageModeling,
    and that with batches of sequences of similar length. Forward, backward, clipping, AdamW, dropout on,
    tokenized before. All ways have the same sequences and start from the same weights.

    The held-out loss is the mean over all masked tokens of passages of other articles, the same masks for
    all, after all epochs. "Packed is faster by" is the median of the ratios of neighboring epochs; `from`
    and `to` are its interval of 95 %.
    """

    input_file: str = setting("", "sentences, one a line, a blank line between articles; .gz", required=True)
    models: str = setting(",".join(MODELS), "models, separated by commas", parse=parse_models)
    sentences: int = setting(16, "most sentences of a passage, from 1; 0 = whole articles", minimum=0)
    vocab_size: int = setting(8192, "WordPieces, trained on the text", minimum=100)
    hidden_size: int = setting(256, "width of the models", minimum=64)
    layers: int = setting(4, "layers of the models", minimum=1)
    num_sequences: int = setting(512, "sequences of an epoch; an eighth as many are held out", minimum=8)
    max_seq_length: int = setting(512, "tokens of a pack, and most of a sequence", minimum=8)
    batch_size: int = setting(16, "sequences of a step", minimum=1)
    learning_rate: float = setting(5e-4, "of AdamW, falling to 0 in each epoch", minimum=0.0)
    repeats: int = setting(5, "timed epochs of each way, after one that is not", minimum=1)
    threads: int = setting(1, "threads of torch", minimum=1)


def main(config):
    """Measure, print and write."""
    import torch

    torch.set_num_threads(config.threads)
    tokenizer, parts = read_parts(config)
    lengths, tables = [len(row) for row in parts["train"]["input_ids"]], {}
    for name in config.models.split(","):
        trainers = make_trainers(config, name, tokenizer, parts)
        ways = {way: lambda _, trainer=trainer: trainer.train() for way, trainer in trainers.items()}
        seconds = time_interleaved(ways, config.repeats)
        tables[name] = way_rows(trainers, seconds, len(lengths), sum(lengths))
        for row in tables[name]:
            row["held-out loss"] = held_out_loss(config, trainers[row["way"]].model, tokenizer, parts["dev"])
    note = f"{len(lengths):,} sequences of {sum(lengths) / len(lengths):.1f} tokens"
    show("masked_lm_trainer", config, tables, [note])


def read_parts(config):
    """A tokenizer, and the `Dataset` of train and dev, of different articles."""
    import datasets
    import transformers

    from bert_packed.text.tokenization import train_vocab

    articles, rng = read_articles(config.input_file), random.Random(0)
    rng.shuffle(articles)
    vocab = train_vocab(articles[: 4 * config.num_sequences], config.vocab_size, True).tokens
    tokenizer = transformers.BertTokenizerFast(vocab={word: number for number, word in enumerate(vocab)})
    parts = {}
    for part, size in (("dev", max(1, config.num_sequences // 8)), ("train", config.num_sequences)):
        texts = []
        while len(texts) < size and articles:
            article = articles.pop()
            start = rng.randrange(len(article)) if config.sentences else 0
            stop = start + rng.randint(1, config.sentences) if config.sentences else None
            texts.append(" ".join(article[start:stop]))
        encoded = tokenizer(texts, truncation=True, max_length=config.max_seq_length)
        parts[part] = datasets.Dataset.from_dict({"input_ids": encoded["input_ids"]})
    return tokenizer, parts


def make_trainers(config, name, tokenizer, parts):
    """`Trainer` by the name of its way, each with a model from the same weights."""
    import transformers

    from bert_packed.torch import pack_dataset

    transformers.logging.set_verbosity_error()
    padding = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    packed = pack_dataset(parts["train"], config.max_seq_length)
    num_packs = max(1, round(config.batch_size * len(packed) / len(parts["train"])))

    def make(collator=None, train_dataset=parts["train"], **options):
        transformers.set_seed(0)
        model = build(config, name, tokenizer)
        collator = collator or make_collator(config, model, tokenizer)
        return make_trainer(config, model, collator, {"train_dataset": train_dataset}, **options)

    return {
        PACKED: make(),
        ONE_PLAN: make(train_dataset=packed, batch_size=num_packs),
        PADDED: make(padding),
        SORTED: make(padding, train_sampling_strategy="group_by_length"),
    }


def build(config, name, tokenizer):
    """A model for masked tokens, with random weights."""
    import transformers

    ids = {one: getattr(tokenizer, one) for one in ("pad_token_id", "cls_token_id", "sep_token_id")}
    is_modern = name == "modernbert"
    sizes = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": max(1, config.hidden_size // 64),
        "intermediate_size": config.hidden_size * (3 if is_modern else 8) // 2,  # gated, or not
        "max_position_embeddings": config.max_seq_length,
    }
    ids |= {"bos_token_id": ids["cls_token_id"], "eos_token_id": ids["sep_token_id"]} if is_modern else {}
    kind = transformers.ModernBertConfig if is_modern else transformers.BertConfig
    made = kind(vocab_size=len(tokenizer), **sizes, **ids)
    return transformers.AutoModelForMaskedLM.from_config(made, attn_implementation="sdpa")


def make_collator(config, model, tokenizer, **options):
    """The `PackingCollator` of a model."""
    from bert_packed.torch import PackingCollator

    window = model.config.sliding_window if model.config.model_type == "modernbert" else None
    return PackingCollator(tokenizer, config.max_seq_length, sliding_window=window, **options)


def held_out_loss(config, model, tokenizer, dataset):
    """The mean over all masked tokens of a data set."""
    from bert_packed.torch import PackingTrainer

    collator = make_collator(config, model, tokenizer, seed=0)
    return make_trainer(config, model, collator, {}, PackingTrainer).evaluate(dataset)["eval_loss"]


if __name__ == "__main__":
    sys.exit(run(main, MaskedLmConfig))
