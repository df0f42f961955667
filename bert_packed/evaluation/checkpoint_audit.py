"""Audit of a checkpoint on real packs: contamination, carried states, gradients and losses."""

import dataclasses

from bert_packed.architectures.registry import (
    ATTENTIONS,
    MASKED_LM,
    WEIGHTINGS,
    ablate,
    ablations,
    without_dropout,
)
from bert_packed.checkpoints.starting_weights import check_exists
from bert_packed.core.progress import count_of
from bert_packed.core.settings import InputError, check_settings, setting
from bert_packed.records.inputs import find_files
from bert_packed.schema import MLM, MLM_NSP
from bert_packed.training.engines import choose_backend, make_engine


@dataclasses.dataclass(frozen=True)
class AuditConfig:
    """Audits contamination. It takes real packs, changes one sequence after another, and reports the
    largest change and gradient that the others see. Both must be exactly 0. Then it compares outputs,
    losses, accuracies and gradients with the same sequences unpacked. Packs of --split_sequences are
    also taken step by step, as in training. Each must continue the whole of the pack before it in its
    row, and nothing else.

    Prints a table. Exit status 0: all within tolerance; 1: not.
    """

    input_file: str = setting("", "packed TFRecords: comma-separated paths or globs", required=True)
    init_checkpoint: str = setting("", "model to audit: as in run_pretraining.py", required=True)
    bert_config_file: str = setting("", "the model's shape; empty = as stored with the checkpoint")
    num_packs: int = setting(
        8,
        "packs to audit, chosen from all of the files: of every depth, with boundaries in all tiles",
        minimum=1,
    )
    mlm_loss: str = setting("per_sequence", "weight of a prediction, as in training", choices=WEIGHTINGS)
    lm_loss: str = setting("per_token", "as mlm_loss, of a Mamba", choices=WEIGHTINGS)
    attention: str = setting(
        "dense",
        "as in run_pretraining.py, without dropout of attention; dense is the loop of a Mamba",
        choices=ATTENTIONS,
    )
    tolerance: float = setting(1e-5, "largest relative difference from unpacked sequences", minimum=0)
    json: str = setting("", "also write the table to this file")

    def __post_init__(self):
        check_settings(self)


def audit_checkpoint(config):
    """Audit a checkpoint as an `AuditConfig` says; prints what is audited.

    Returns:
        Rows of a table, a dict for each check: `name`, `largest`, `tolerance` and `result`, "pass" or "FAIL".

    Raises:
        InputError: the records hold no pack of several sequences, or do not fit the checkpoint.
    """
    check_exists(config.init_checkpoint)
    choose_backend()
    # TensorFlow and Keras: not for --help
    from bert_packed.checkpoints import starting_weights
    from bert_packed.data import input_pipeline
    from bert_packed.data.batches import CheckedBatches
    from bert_packed.evaluation import carried_states, contamination, pack_coverage
    from bert_packed.kernels.choose import TILE, choose_kernels
    from bert_packed.objectives.pretraining import check_losses, choose_objective
    from bert_packed.parallel.targets import devices_here
    from bert_packed.records import record_rules
    from bert_packed.records.split_sequences import find_num_rows
    from bert_packed.training.backend import check_memory, out_of_memory_names

    files = find_files(config.input_file, "input_file")
    spec = record_rules.read_pack_spec(files)
    model_config = read_trained_config(config)
    check_losses(config, spec.objective)
    # A model of masked tokens alone has no head for the next-sentence labels of such records
    learnt = spec.objective
    if learnt == MLM_NSP and starting_weights.stored_head(config.init_checkpoint)[0] == MASKED_LM:
        learnt = MLM
    num_rows = find_num_rows(files)
    objective = choose_objective(learnt, model_config, config, num_rows)
    missing = None
    if num_rows:  # which are taken from their beginning
        packed = input_pipeline.eval_batches(files, spec, config.num_packs, objective.features)
    else:
        index, numbers, missing = pack_coverage.choose_packs(files, spec, config.num_packs)
        packed = input_pipeline.chosen_packs(index, spec, numbers, objective.features)
    batch = next(CheckedBatches(packed, files, spec, model_config, objective.features))
    num_sequences = int(batch["slot_weights"].sum())
    # Every check would pass without neighbours, and prove nothing
    if not contamination.num_neighbours(batch):
        raise InputError("`input_file` must hold several sequences in a pack. Received: one in each.")
    packs = carried_states.take_rows(batch, num_rows) if num_rows else None
    check_memory(model_config)
    kernels = choose_kernels(
        config.attention, without_dropout(model_config), spec.max_seq_length, devices_here().platform
    )
    engine = make_engine(
        objective.build_model(model_config, seed=0, num_rows=num_rows or None, **kernels.options),
        objective,
        micro_batch_size=int((batch["slot_weights"].sum(axis=1) > 0).sum()),
    )
    found = starting_weights.load(
        config.init_checkpoint, engine.weights(), model_config, engine.model.head, True
    )
    print("\n".join(found.lines()))
    print(
        f"audits {count_of(num_sequences, 'sequence')}; packs of more than one: "
        f"{contamination.num_neighbours(batch)}; attention: {kernels.description}"
    )
    num_slots, length = spec.max_sequences_per_pack, spec.max_seq_length
    print(pack_coverage.describe_boundaries(batch["sequence_ids"], num_slots, missing))
    if model_config.chunk_size:
        is_fused = {"scan", "duality"} & kernels.options.keys()
        chunk_length = min(TILE if is_fused else model_config.chunk_size, length)
        print(pack_coverage.describe_places(batch, chunk_length, "the scan's chunks"))
    elif kernels.options:
        print(pack_coverage.describe_places(batch, TILE, "the kernel's tiles"))
    with out_of_memory_names("the audit", "num_packs"):
        checks = contamination.audit(engine, batch, config.tolerance)
        if num_rows:
            checks += carried_states.audit(engine.model, packs, config.tolerance)
    # The only trace of a model that was trained without next-sentence loss
    checks.append(
        contamination.Check("settings: ablations of the checkpoint", len(ablations(model_config)), 0)
    )
    return [{**dataclasses.asdict(check), "result": "pass" if check.passed else "FAIL"} for check in checks]


def read_trained_config(config):
    """The model's config with the ablations that it was trained under, which a plain config must not hide."""
    from bert_packed.checkpoints import starting_weights

    model_config = starting_weights.read_model_config(config.init_checkpoint, config.bert_config_file)
    return ablate(model_config, ",".join(starting_weights.stored_ablations(config.init_checkpoint)))
