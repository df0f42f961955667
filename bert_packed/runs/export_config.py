"""The frozen config of an export, and what of it must fit the model."""

import dataclasses

from bert_packed.core.settings import InputError, check_depth_fits, check_settings, setting
from bert_packed.schema import PackSpec

FORMATS = ("hf", "keras", "saved_model")
DEFAULT_DEPTH, DEFAULT_PREDICTIONS = 3, 76
IF_HF = {"format=hf": "be left out unless --format=hf"}


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Writes a packed model in a form that other programs open.

    hf           config.json, model.safetensors and a model card, README.md. It opens with
                 transformers.BertForPreTraining.from_pretrained(OUTPUT_DIR), or with BertForMaskedLM without
                 next sentences. A fine-tuned model opens as BertForQuestionAnswering,
                 BertForSequenceClassification or BertForTokenClassification, a Mamba as MambaForCausalLM or
                 Mamba2ForCausalLM.
    keras        model.keras. Import bert_packed.architectures.bert.model, .modern_bert.model, .mamba.model or
                 .mamba2.model, where the model's class is. Then call keras.saving.load_model.
    saved_model  TensorFlow SavedModel of static shapes, with signatures `packed` and `unpacked`. It returns
                 the logits of the heads that the model has.
    """

    init_checkpoint: str = setting(
        "", "what to export: as in run_pretraining.py", required=True, group="Checkpoint and folder"
    )
    output_dir: str = setting("", "folder to make; it must be missing or empty", required=True)
    format: str = setting("hf", "form to write", choices=FORMATS)
    bert_config_file: str = setting("", "the model's shape; empty = as stored with the checkpoint")
    vocab_file: str = setting(
        "",
        "hf: WordPieces or, of a Mamba, a tokenizer.json, to write a tokenizer too; empty = that of the run "
        "of init_checkpoint, if it keeps one",
        only_with=IF_HF,
        group="Hugging Face",
    )
    do_lower_case: bool = setting(True, "hf: whether WordPieces are without case and accents")
    audit_file: str = setting(
        "",
        "hf: what bert-packed audit --json=FILE wrote of it, for the model card; empty = none",
        only_with=IF_HF,
    )
    batch_size: int = setting(8, "saved_model: packs per call", minimum=1, group="SavedModel")
    max_seq_length: int = setting(512, "saved_model: tokens per pack", minimum=1)
    max_sequences_per_pack: int = setting(
        0, "saved_model of a BERT that pre-trains or classifies: sequences per pack; 0 = 3", minimum=0
    )
    max_predictions_per_pack: int = setting(
        0, "saved_model of a BERT that pre-trains: masked-LM positions per pack; 0 = 76", minimum=0
    )

    def __post_init__(self):
        check_settings(self)
        check_depth_fits(self.max_sequences_per_pack, self.max_seq_length)

    @property
    def spec(self):
        """The static shapes of a SavedModel."""
        return PackSpec(
            self.max_seq_length,
            # No pack of S tokens holds more than S sequences
            self.max_sequences_per_pack or min(DEFAULT_DEPTH, self.max_seq_length),
            self.max_predictions_per_pack or DEFAULT_PREDICTIONS,
        )


def check_shapes(config, family, letters):
    """Raise `InputError` where a size is given that no input of the export has."""
    for name, letter in (("max_sequences_per_pack", "K"), ("max_predictions_per_pack", "P")):
        # A size that nothing reads would be taken for honoured
        value, why = getattr(config, name), None
        if config.format != "saved_model":
            why = "unless --format=saved_model"
        elif letter not in letters:
            why = f"for this {family.name}, whose SavedModel has no input of that size"
        if value and why:
            raise InputError(f"`{name}` must be left out {why}. Received: {value}.")
