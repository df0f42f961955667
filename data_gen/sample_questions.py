"""Sample data of `run_squad.py`: the project's own questions, and a vocabulary for them."""

import json
import os
from pathlib import Path

from bert_packed.core.storage import write_whole
from bert_packed.text import tokenization
from data_gen.text.sample_corpus import read_sample_documents

QUESTIONS_FILE = Path(__file__).with_name("sample_questions.json")
SAMPLE_DIR = os.path.join("sample_data", "questions")
VOCAB_SIZE = 8192


def build_missing(do_lower_case=True):
    """Train the vocabulary, if missing, on the embedded corpus and the questions; returns its path."""
    folder = os.path.join(SAMPLE_DIR, "uncased" if do_lower_case else "cased")
    path = os.path.join(folder, "vocab.txt")
    if not os.path.exists(path):
        articles = json.loads(QUESTIONS_FILE.read_text(encoding="utf-8"))["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        questions = [entry["question"] for paragraph in paragraphs for entry in paragraph["qas"]]
        texts = [*(paragraph["context"] for paragraph in paragraphs), *questions]
        documents = [*read_sample_documents(), texts]
        vocabulary = tokenization.train_vocab(documents, VOCAB_SIZE, do_lower_case)
        os.makedirs(folder, exist_ok=True)
        with write_whole(path) as partial:  # a kill must not leave half a vocabulary
            tokenization.save_vocab(vocabulary, partial)
    return path
