"""Export of a checkpoint in the form of Hugging Face, Keras or a SavedModel."""

from pathlib import Path

from bert_packed.architectures.registry import TOKEN_CLASSIFICATION, ablations, check_at_most, family_of
from bert_packed.checkpoints.starting_weights import check_exists
from bert_packed.core.settings import InputError
from bert_packed.core.storage import write_folder
from bert_packed.runs.export_config import check_shapes
from bert_packed.training.engines import choose_backend


def export_checkpoint(config):
    """Write a checkpoint as an `ExportConfig` says; prints what was loaded and left out.

    The folder is complete or absent. Raises `InputError` where the checkpoint, the vocabulary and the format
    do not fit, or the folder is in use.
    """
    check_exists(config.init_checkpoint)
    check_backend(config, choose_backend())
    output = check_output(config.output_dir)
    # Keras: not for --help
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
    check_shapes(config, family, export_formats.signature_letters(head))
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
            write_model_card(partial, model, run, step, audit)
        elif config.format == "keras":
            export_formats.write_keras(partial, model)
        else:
            export_formats.write_saved_model(partial, model, config.spec, config.batch_size)
    print(f"wrote {config.format} to {config.output_dir}")


def check_backend(config, backend):
    """Raise `InputError` where a backend cannot write the format."""
    if config.format == "saved_model" and backend != "tensorflow":
        raise InputError(
            f"`format` must not be saved_model unless KERAS_BACKEND=tensorflow. Received: {backend}."
        )


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
    from bert_packed.checkpoints.exported_tokenizer import check_vocabulary

    if config.format == "saved_model":
        check_at_most(model_config, "max_position_embeddings", "`max_seq_length`", config.max_seq_length)
    if config.vocab_file:
        check_vocabulary(config.vocab_file, model_config)
