"""Command line: write a checkpoint in the form of Hugging Face, Keras or a SavedModel."""

import sys

from bert_packed.core.command_line import run
from bert_packed.runs.checkpoint_export import export_checkpoint
from bert_packed.runs.export_config import ExportConfig

DESCRIPTION = """
Writes a packed model in a form that other programs open.

hf           config.json, model.safetensors and a model card, README.md. It opens with
             transformers.BertForPreTraining.from_pretrained(OUTPUT_DIR), or with BertForMaskedLM without next
             sentences. A fine-tuned model opens as BertForQuestionAnswering, BertForSequenceClassification or
             BertForTokenClassification, a Mamba as MambaForCausalLM or
             Mamba2ForCausalLM.
keras        model.keras. Import bert_packed.architectures.bert.model, for a fine-tuned model bert_packed.architectures.bert.heads,
             for a Mamba bert_packed.architectures.mamba.model or .mamba2. Then call keras.saving.load_model.
saved_model  TensorFlow SavedModel of static shapes, with signatures `packed` and `unpacked`. It returns the
             logits of the heads that the model has.
"""


def main(config):
    """Load, write and report what was left out."""
    export_checkpoint(config)


def command():
    """Run `main` with the flags of the command line; returns the exit status."""
    return run(main, ExportConfig, DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
