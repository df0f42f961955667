"""Training, and the share of texts that the trained model gets right."""

from pathlib import Path

import numpy as np

from bert_packed.tasks import run
from bert_packed.tasks.batches import LabelledSequences
from bert_packed.tasks.classify.losses import LABELS, classes_objective
from bert_packed.tasks.rows import make_text_sequences


def finetune(config, processes):
    text = run.read_text_model(config, processes)
    lines = Path(config.text_file).read_text().splitlines()
    labels = np.array([len(line.split()) % 2 for line in lines])
    sequences, _ = make_text_sequences([lines], text.tokenizer, config.max_seq_length, config.text_file)

    def read_training():
        return LabelledSequences(sequences, {LABELS.name: labels}), {"text_file": [config.text_file]}

    def predict(model, folder):
        outputs, _ = run.predict_packed(config, run.forward_of(model), sequences)
        return {"accuracy": float(np.mean(np.stack(outputs["logits"]).argmax(axis=1) == labels))}

    return run.run_task(config, text, classes_objective(2), read_training, predict)
