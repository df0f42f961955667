"""Whether the files of a pre-training in two phases fit one another and the model, before the first hour."""

import dataclasses

from benchmarks.paired_data import check_data
from benchmarks.planned_runs import CONFIGS, SQUAD, settings_of
from benchmarks.pretraining_stages import KINDS, PHASES, make_runs
from bert_packed.config import load_model_config
from bert_packed.core.files import file_sha256
from bert_packed.core.settings import InputError
from bert_packed.tasks.squad import read_squad


def check_inputs(config, packing_factors):
    """Check what the last run would say of its files and its model, and all before it.

    Args:
        config, packing_factors: As of `pretraining_stages.make_runs`.

    Raises:
        InputError: as of `paired_data.check_data`; a flag of a run is wrong; `vocab_file` is not that of the
            records; sequences of fine-tuning are longer than the model's positions; or a SQuAD file is none.
    """
    runs = make_runs(dataclasses.replace(config, only=",".join(KINDS)), packing_factors)
    settings = {run.variant: settings_of(run, config.output_dir) for run in runs}
    for phase in PHASES:
        names = [f"{phase}_{name}" for name in ("packed", "unpacked", "eval")]
        of_phase = next(found for variant, found in settings.items() if variant.startswith(phase))
        known = check_data(of_phase, **{name: getattr(config, name) for name in names})
        own = file_sha256(config.vocab_file)
        if known and own not in known:
            raise InputError(
                f"`vocab_file` must be the one that the records of {phase} were made with, of SHA-256 "
                f"{known[0][:12]}... by their manifest.json. Received: {config.vocab_file}, of {own[:12]}..."
            )
    squad = next(found for found in settings.values() if isinstance(found, CONFIGS[SQUAD]))
    model = load_model_config(config.bert_config_file)
    if squad.max_seq_length > model.max_position_embeddings:
        raise InputError(
            f"`finetuning_flags` must give a max_seq_length of at most max_position_embeddings="
            f"{model.max_position_embeddings} of {config.bert_config_file}. Received: {squad.max_seq_length}."
        )
    for path, for_training in ((squad.train_file, True), (squad.predict_file, False)):
        read_squad(path, for_training, squad.version_2_with_negative, squad.skip_bad_answers)
