"""Export of a checkpoint in the form of Hugging Face, Keras or a SavedModel."""

import dataclasses
from pathlib import Path

from bert_packed.architectures.registry import TOKEN_CLASSIFICATION, ablations, check_at_most, family_of
from bert_packed.core.hub import OWNED, find_model, push_folder
from bert_packed.core.settings import InputError, check_depth_fits, check_settings, setting
from bert_packed.core.storage import write_folder
from bert_packed.schema import PackSpec
from bert_packed.training.engines import choose_backend


def export_checkpoint(config):
    """Write a checkpoint as an `ExportConfig` says; prints what was loaded and left out.

    The folder is complete or absent. Raises `InputError` where the checkpoint, the vocabulary and the format
    do not fit, or the folder is in use.
    """
    config = dataclasses.replace(config, init_checkpoint=find_model(config.init_checkpoint))
    backend = choose_backend()
    if config.format == "saved_model" and backend != "tensorflow":
        raise InputError(
            f"`format` must not be saved_model unless KERAS_BACKEND=tensorflow. Received: {backend}."
        )
    output = check_output(config.output_dir)
    # These import Keras, which --help need not wait for
    from bert_packed.architectures.packed_model import build_model
    from bert_packed.checkpoints import export_formats, starting_weights
    from bert_packed.runs.exports import read_audit, read_origin, write_model_card
    from bert_packed.runs.vocabulary import trained_length, with_run_vocabulary
    from bert_packed.training.backend import check_memory
    from bert_packed.training.engines.engine import named_weights

    config = with_run_vocabulary(config)
    model_config = starting_weights.read_model_config(config.init_checkpoint, config.bert_config_file)
    family = family_of(model_config)
    check_fits(config, model_config)
    run, step = read_origin(config.init_checkpoint)
    audit = read_audit(config.audit_file) if config.audit_file else None
    head, num_outputs = starting_weights.stored_head(config.init_checkpoint)
    if head not in family.heads:
        head = family.heads[0]  # loading says whose tensors they are
    for name, letter in (("max_sequences_per_pack", "K"), ("max_predictions_per_pack", "P")):
        # A size that nothing reads would be taken for honoured
        if getattr(config, name) and letter not in export_formats.signature_letters(head):
            raise InputError(
                f"`{name}` must be left out for this {family.name}, whose SavedModel has no input of that "
                f"size. Received: {getattr(config, name)}."
            )
    check_memory(model_config)
    model = build_model(head, model_config, seed=0, num_outputs=num_outputs)
    found = starting_weights.load(config.init_checkpoint, named_weights(model), model_config, head)
    print("\n".join(found.lines()))
    classes = starting_weights.stored_labels(config.init_checkpoint) if head == TOKEN_CLASSIFICATION else ()
    if ablations(model_config):
        print(
            f"WARNING: this model was trained with --ablation={','.join(ablations(model_config))}; other "
            "programs know nothing of that"
        )
    # Complete or absent: half an export would open in other programs
    with write_folder(output) as partial:
        if config.format == "hf":
            text = config.vocab_file, config.do_lower_case
            export_formats.write_hugging_face(
                partial, model, named_weights(model), found.missing, *text, classes, trained_length(run)
            )
            write_model_card(partial, model, run, step, audit, config.language)
        elif config.format == "keras":
            export_formats.write_keras(partial, model)
        else:
            export_formats.write_saved_model(partial, model, config.spec, config.batch_size)
    print(f"wrote {config.format} to {config.output_dir}")
    if config.push_to_hub:
        print(f"pushed to {push_folder(output, config.push_to_hub)}")


def check_output(output_dir):
    """The path of a folder that an export may take; raises `InputError`."""
    output = Path(output_dir).resolve()
    if output == Path.cwd():  # it is moved into place: the caller's shell would stay in a removed folder
        raise InputError(f"`output_dir` must not be the current folder. Received: {output_dir}.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"`output_dir` must be missing or empty. Received: {output_dir}.")
    return output


def check_fits(config, model_config):
    """Raise `InputError` where lengths or the vocabulary of an export do not fit the model."""
    from bert_packed.checkpoints.export_formats import check_vocabulary

    if config.format == "saved_model":
        check_at_most(model_config, "max_position_embeddings", "`max_seq_length`", config.max_seq_length)
    if config.vocab_file:
        check_vocabulary(config.vocab_file, model_config)


FORMATS = ("hf", "keras", "saved_model")
DEFAULT_DEPTH, DEFAULT_PREDICTIONS = 3, 76
IF_HF = {"format=hf": "be left out unless --format=hf"}
IF_SAVED_MODEL = {"format=saved_model": "be left out unless --format=saved_model"}


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
    language: str = setting(
        "",
        "hf: codes of the languages of the text, such as en or en,de, for the model card; empty = not known",
        only_with=IF_HF,
    )
    push_to_hub: str = setting(
        "",
        "hf: OWNER/NAME on the Hugging Face hub that receives the folder too, by HF_TOKEN; a new one is "
        "private; empty = none",
        only_with=IF_HF,
    )
    batch_size: int = setting(8, "saved_model: packs per call", minimum=1, group="SavedModel")
    max_seq_length: int = setting(512, "saved_model: tokens per pack", minimum=1)
    max_sequences_per_pack: int = setting(
        0,
        "saved_model of a BERT that pre-trains or classifies: sequences per pack; 0 = 3",
        only_with=IF_SAVED_MODEL,
    )
    max_predictions_per_pack: int = setting(
        0,
        "saved_model of a BERT that pre-trains: masked-LM positions per pack; 0 = 76",
        only_with=IF_SAVED_MODEL,
    )

    def __post_init__(self):
        check_settings(self)
        if self.push_to_hub and not OWNED.fullmatch(self.push_to_hub):
            raise InputError(f"`push_to_hub` must be OWNER/NAME. Received: {self.push_to_hub}.")
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
