"""A task of eight topics: sentences of Wikipedia, by what their article is said to be about.

python -m benchmarks.wikipedia_topics --input_file=enwik8_sentences.txt.gz --output_dir=topics
"""

import collections
import csv
import dataclasses
import gzip
import random
import re
import sys
from pathlib import Path

from benchmarks.runner import Settings, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.core.storage import write_folder

DEFINES = re.compile(r"\b(?:is|was|are|were) (?:an?|the|one of the)\b(.{0,80})")
TOPICS = {
    "person": "politician actor actress writer novelist composer musician singer painter poet physicist "
    "mathematician philosopher king emperor pope saint general scientist chemist economist president player",
    "place": "city town village county river island country state province region lake mountain district",
    "work": "film album novel book song band series play poem magazine newspaper opera movie game",
    "life": "species genus plant animal disease bird fish tree organ protein mammal",
    "technology": "software computer protocol device machine aircraft algorithm vehicle processor weapon",
    "language": "language dialect alphabet letter word",
    "mathematics": "theorem function number set theory equation unit",
    "chemistry": "element compound chemical mineral metal acid molecule gas",
}
TOPIC_OF = {word: topic for topic, words in TOPICS.items() for word in words.split()}


@dataclasses.dataclass(frozen=True)
class TopicsConfig(Settings):
    """Writes train.csv and dev.csv, of columns text and label. The first sentence of an article, which names
    its topic, is left out. dev.csv has sentences of other articles.
    """

    input_file: str = setting("", "sentences, one a line, a blank line between articles; .gz", required=True)
    output_dir: str = setting("", "folder to write", required=True)
    sentences: int = setting(20, "most sentences of an article", minimum=1)
    dev_share: float = setting(0.1, "share of the articles for dev.csv", minimum=0, maximum=1)
    seed: int = setting(0, "seed of the choice of articles")


def main(config):
    """Read, choose and write."""
    rng, rows = random.Random(config.seed), {"train": [], "dev": []}
    for first, *others in read_articles(config.input_file):
        if topic := topic_of(first):
            part = "dev" if rng.random() < config.dev_share else "train"
            rows[part] += [(sentence, topic) for sentence in others[: config.sentences]]
    with write_folder(config.output_dir) as folder:
        for part, found in rows.items():
            if not found:
                raise InputError(
                    f"`input_file` must have articles of known topics for {part}. Received: none."
                )
            with open(Path(folder) / f"{part}.csv", "w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([("text", "label"), *found])
    counts = {part: collections.Counter(topic for _, topic in found) for part, found in rows.items()}
    table = [{"topic": topic, **{part: found[topic] for part, found in counts.items()}} for topic in TOPICS]
    show("wikipedia_topics", config, {"sentences": table}, how="Counted")


def read_articles(path):
    """The articles of a file: list of lists of sentences."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [article.splitlines() for article in re.split(r"\n\s*\n", file.read()) if article.strip()]


def topic_of(sentence):
    """The topic that a definition names first; None where it names none of them."""
    found = DEFINES.search(sentence[:250])
    words = re.findall(r"\w+", found[1].lower()) if found else []
    return next((TOPIC_OF[word] for word in words if word in TOPIC_OF), None)


if __name__ == "__main__":
    sys.exit(run(main, TopicsConfig))
