"""Exports of a run while it trains, in the form of Hugging Face: OUTPUT_DIR/export-200/ and so on."""

from bert_packed.checkpoints.export_formats import write_hugging_face
from bert_packed.checkpoints.exported_tokenizer import check_vocabulary
from bert_packed.core.settings import InputError
from bert_packed.core.storage import file_sha256, write_folder
from bert_packed.runs.model_card import write_model_card
from bert_packed.runs.run_directory import read_run
from bert_packed.runs.vocabulary import find_copy, trained_length


def check_export(config, model_config, data):
    """Check the tokenizer that a run is to export, before the run starts.

    Raises `InputError` where the vocabulary is no such file, has more tokens than the model, or is not the
    records'; `OSError` where it cannot be read.
    """
    path = config.export_vocab_file
    if not path:
        return
    check_vocabulary(path, model_config, "export_vocab_file")
    known = data.train.vocabularies or ([data.vocabulary.facts["sha256"]] if data.vocabulary else [])
    # Without manifests and `vocab_file` there is nothing to compare with
    if known and file_sha256(path) not in known:
        raise InputError(
            "`export_vocab_file` must be the vocabulary of `input_file`, by the manifest.json beside that or "
            f"by `vocab_file`. Received: {path}, another one."
        )


def export_step(folder, step, model, weights, config, data):
    """Write `export-STEP`, whole or not at all, in place of an earlier export of the step; return its path.

    Raises `NotFiniteError` where a weight is NaN or infinite, and `OSError` where the disk is full.
    """
    # All records are of one vocabulary, so the first manifest that has the rule speaks for all
    cased = [manifest["do_lower_case"] for manifest in data.train.manifests if "do_lower_case" in manifest]
    with write_folder(folder / f"export-{step}") as partial:
        write_hugging_face(
            partial,
            model,
            weights,
            vocab_file=config.export_vocab_file or find_copy(folder),
            max_length=trained_length(read_run(folder)),
            do_lower_case=cased[0] if cased else True,
        )
        write_model_card(partial, model, read_run(folder), step)
    return folder / f"export-{step}"
