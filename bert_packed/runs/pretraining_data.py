"""Data of a pre-training run: packs that are checked before the first step, and their batches."""

import dataclasses
import functools
import itertools
import os

from bert_packed.architectures import registry
from bert_packed.checkpoints.export_formats import check_form
from bert_packed.core.settings import InputError
from bert_packed.data import input_pipeline
from bert_packed.data.batches import CheckedBatches, GrowingBatches, ReadAhead
from bert_packed.data.dynamic_masking import DynamicMasking, MaskedBatches
from bert_packed.data.read_order import ProcessShard, balance_steps
from bert_packed.objectives.pretraining import check_losses, check_records
from bert_packed.parallel.processes import ALONE
from bert_packed.parallel.replicas import count_replicas, group_of
from bert_packed.records import record_rules
from bert_packed.records.inputs import find_files, folder_of
from bert_packed.records.provenance import MANIFEST_NAME, read_manifest
from bert_packed.records.read_bert import read_packed
from bert_packed.runs.input_files import NO_PACKS, PackedFiles, describe_inputs, packed_manifest, scan_inputs
from bert_packed.runs.run_directory import SCANS_FILE, check_own
from bert_packed.runs.vocabulary import RecordsVocabulary, find_records_vocabulary, make_masking


@dataclasses.dataclass(frozen=True)
class PackedData:
    """All records of a run: those of three flags, whose K and P may differ."""

    train: PackedFiles
    eval: PackedFiles
    unpacked: PackedFiles
    inputs: dict[str, list[dict]]  # by flag name, descriptions of the files that the result depends on
    vocabulary: RecordsVocabulary | None = None  # of the training packs; None where it is not found
    masking: DynamicMasking | None = None  # of the training packs; None where their masks stay

    @property
    def num_packs(self):
        """Training packs."""
        return sum(entry["num_records"] for entry in self.inputs["input_file"])

    @property
    def facts(self):
        """Facts of the data that `run.json` keeps: dict of `inputs`, `vocabulary` and `data`."""
        vocabulary = self.vocabulary and self.vocabulary.facts
        facts = {
            "packing_factor": self.train.packing_factor,
            "longest_sequence": self.train.longest if self.train.has_all_manifests else None,
            "vocabularies": self.train.vocabularies,
            "masking_vocabulary": vocabulary["sha256"] if self.masking else None,
        }
        return {"inputs": self.inputs, "vocabulary": vocabulary, "data": facts}


def read_data(config, processes=ALONE):
    """Find, scan and check the records of a `PretrainingConfig`: `PackedData`. All `processes` call this.

    The scans of every byte are kept in the output directory, even if the run does not start.

    Raises:
        InputError: no file matches, a file is damaged or unpacked, files disagree in shape or vocabulary,
            the packing factor or the vocabulary is needed and unknown, or the output directory is not a
            run's.
    """
    # This comes before a reading of all records, which may take long
    check_own(config.output_dir)
    check_losses(config, config.objective)
    names = ("input_file", "eval_input_file", "unpacked_input_file")
    train, held_out, unpacked = (_find_packs(config, name) for name in names)
    others = {"eval_input_file": held_out, "unpacked_input_file": unpacked}
    _check_rows(config, train, others)
    _check_claims(config, {"input_file": train, "eval_input_file": held_out})
    _check_balance(config, train)
    # The correction adapts LAMB's betas to the sequences of a step, which are then unknown
    if train.packing_factor is None and config.packing_correction == "betas":
        raise InputError(
            "`packing_correction` must be none where no manifest.json beside the records gives the packing "
            "factor. Received: betas."
        )
    _check_vocabularies({"input_file": train, **others})
    if unpacked.files:
        _check_comparable(train, unpacked)
    # This comes before the scan, too: a missing vocabulary should not cost a pass over all records
    vocabulary = find_records_vocabulary(config, train)
    paths = sorted({*train.files, *held_out.files})
    scans = scan_inputs(paths, os.path.join(config.output_dir, SCANS_FILE), processes)
    train, held_out = (
        dataclasses.replace(found, found=[scans[path] for path in found.files]) for found in (train, held_out)
    )
    if train.num_rows:
        _check_all_rows(train)
    inputs = {
        name: describe_inputs(found.files, found.found, are_checked=True)
        for name, found in (("input_file", train), ("eval_input_file", held_out))
    }
    return PackedData(train, held_out, unpacked, inputs, vocabulary, make_masking(config, vocabulary))


def read_shapes(config):
    """Shapes and manifests of `input_file`, for compiling, without a pass over its records: `PackedData`.

    It has no held-out records and no `inputs`. Raises `InputError` where no file matches, a file is unpacked,
    or files disagree in shape.
    """
    train = _find_packs(config, "input_file")
    _check_rows(config, train, {})
    return PackedData(train, NO_PACKS, NO_PACKS, {})


def read_eval_data(config):
    """The packs of `eval_input_file` in the place of the training packs too, to evaluate alone: `PackedData`.

    Raises `InputError` as `read_data` does.
    """
    check_own(config.output_dir)
    check_losses(config, config.objective)
    held_out = _find_packs(config, "eval_input_file")
    _check_rows(config, NO_PACKS, {"eval_input_file": held_out})
    _check_claims(config, {"eval_input_file": held_out})
    describe_inputs(held_out.files)
    return PackedData(held_out, held_out, NO_PACKS, {})


def _check_claims(config, found):
    """Check `max_seq_length` and `max_predictions_per_seq` against records and the instances' manifests."""
    for name, packs in found.items():
        if not packs.files:
            continue
        if config.max_seq_length not in (0, packs.spec.max_seq_length):
            raise InputError(
                f"`max_seq_length` must be that of the packs of `{name}`, {packs.spec.max_seq_length}. "
                f"Received: {config.max_seq_length}."
            )
        most = config.max_predictions_per_seq
        known = {folder: _predictions_in(folder) for folder in packs.input_folders}
        for folder, number in known.items():
            if most and number not in (None, most):
                raise InputError(
                    f"`max_predictions_per_seq` must be that of the instances of `{name}`, {number} by "
                    f"{folder}/{MANIFEST_NAME}. Received: {most}."
                )
        # Where a manifest does not have it, the first packs are read, though others may hold more
        if most and (not known or None in known.values()):
            number = int(next(read_packed(packs.files[0]))["num_predictions"].max())
            if number > most:
                raise InputError(
                    f"`max_predictions_per_seq` must be at least that of a sequence in {packs.files[0]}, "
                    f"{number}. Received: {most}."
                )


def _predictions_in(folder):
    """The `max_predictions_per_seq` of the instances in a folder, by their manifest; None without one."""
    manifest = read_manifest(folder, any_json=True) or {}
    settings = manifest.get("settings")
    number = settings.get("max_predictions_per_seq") if isinstance(settings, dict) else None
    return number if manifest.get("kind") == "unpacked" and type(number) is int else None


def model_config_of(config, data):
    """The model's config of a run, by its flags and the vocabulary of its records."""
    model_config = registry.load_model_config(config.bert_config_file, data.train.vocab_size)
    model_config = registry.override_context(registry.override_dropout(model_config, config), config)
    return registry.ablate(model_config, config.ablation)


def check_fits(data, model_config, config):
    """Check by the manifests that the records fit the model.

    Raises `InputError` where a vocabulary, a sequence or a pack of one count of positions is larger than the
    model's tables, or the vocabulary is of no kind that its family has.
    """
    model, length = config.bert_config_file, data.train.spec.max_seq_length
    if model_config.ablation_no_position_reset:
        # The batches' checked positions restart; the ablation's do not, and a look-up would clip them
        what = "the length of packs of `input_file`, with ablation=no_position_reset,"
        registry.check_at_most(model_config, "max_position_embeddings", what, length, model)
    if data.vocabulary:
        check_form(data.vocabulary.path, model_config)  # what it learns of others has no export
        what = "the vocabulary of `vocab_file`"
        registry.check_at_most(model_config, "vocab_size", what, data.vocabulary.size, model)
    for name, found in (("input_file", data.train), ("eval_input_file", data.eval)):
        what = f"the vocabulary of `{name}`"
        registry.check_at_most(model_config, "vocab_size", what, found.vocab_size or 0, model)
        what = f"the longest sequence of `{name}`"
        registry.check_at_most(model_config, "max_position_embeddings", what, found.longest, model)


def _find_packs(config, name):
    """The records that a flag names."""
    pattern = getattr(config, name)
    if not pattern:
        return NO_PACKS
    files = find_files(pattern, name)
    spec = record_rules.read_pack_spec(files, name, pattern)
    folders = sorted({folder_of(path) for path in files})
    manifests = [manifest for folder in folders if (manifest := packed_manifest(folder))]
    found = PackedFiles(files, spec, manifests, len(manifests) == len(folders))
    check_records(config, name, found)
    return found


def _check_rows(config, train, others):
    """Check that a run reads the packs of rows in their order, each row at its own place in the batch."""
    for name, found in others.items():
        if found.num_rows:
            raise InputError(
                f"`{name}` must hold packs made without --split_sequences. Received: {found.files[0]}."
            )
    if not train.num_rows:
        return
    if len(train.manifests) > 1:
        raise InputError(
            "`input_file` must be all packs of one --split_sequences. Received: those of "
            f"{len(train.manifests)} folders."
        )
    if config.ablation:  # a pack would go on from its own beginning
        raise InputError(
            f"`ablation` must be empty for packs made with --split_sequences. Received: {config.ablation}."
        )
    # A step takes the next pack of every row, in file order, on one replica, which keeps their states. A mean
    # per sequence does not exist where a sequence is spread over several packs
    wanted = {
        "train_batch_size": train.num_rows,
        "shuffle_buffer_size": 1,
        "distribution": "none",
        "lm_loss": "per_token",
        "batch_warmup_steps": 0,
    }
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise InputError(
                f"`{name}` must be {value} for packs of {train.num_rows} rows, made with --split_sequences. "
                f"Received: {getattr(config, name)}."
            )


def _check_balance(config, train):
    num_devices, size = config.balanced_devices, config.packs_at_once
    if num_devices and size % num_devices:
        raise InputError(
            f"`balanced_devices` must divide a micro-batch, of {size} packs. Received: {num_devices}."
        )
    if num_devices > 1 and None in train.plans[2]:
        raise InputError(
            "`balanced_devices` must be 0 where no manifest.json beside the records has their plan, which "
            f"has the lengths of their sequences. Received: {num_devices}, for "
            f"{train.files[train.plans[2].index(None)]}."
        )


def _check_all_rows(train):
    """Check that no pack of rows is left out, after which each row would go on from another's states."""
    num_packs, found = train.manifests[0]["num_packs"], sum(scan.num_records for scan in train.found)
    if found != num_packs:
        raise InputError(
            f"`input_file` must be all {num_packs} packs of one --split_sequences. Received: {found}."
        )


def _check_vocabularies(found):
    known = {name: packs.vocabularies for name, packs in found.items() if packs.vocabularies}
    if len({checksum for checksums in known.values() for checksum in checksums}) > 1:
        parts = "; ".join(
            f"{name}: {', '.join(c[:12] for c in checksums)}" for name, checksums in known.items()
        )
        raise InputError(f"all records must be of one vocabulary. Received vocab_sha256 of {parts}.")


def _check_comparable(train, unpacked):
    # A mistake must show before training, not when the comparison is made
    if unpacked.spec.max_sequences_per_pack != 1 or unpacked.spec.max_seq_length != train.spec.max_seq_length:
        raise InputError(
            "`unpacked_input_file` must hold packs of one sequence and the length of `input_file`. "
            f"Received: {unpacked.spec}, {train.spec}."
        )
    if train.packing_factor is None:
        raise InputError(
            "`unpacked_input_file` needs the packing factor of `input_file`, from a manifest.json beside it. "
            "Received: none."
        )
    counts = [sum(m["num_sequences"] for m in found.manifests) for found in (unpacked, train)]
    # The number of unpacked records is unknown where no manifest is beside them
    if counts[0] not in (0, counts[1]):
        raise InputError(
            "`unpacked_input_file` must hold the sequences of `input_file`. Received manifests with other "
            "numbers of sequences."
        )


def train_batches(run, first_step=0, packs=None):
    """`ReadAhead` of the endless batches of a `Run` from `first_step` on, this process's part of each.

    `packs` are `PackedFiles`; None for the training packs.
    """
    config, masking, features = run.config, run.data.masking, run.objective.features
    num_devices, packs = 0 if packs else config.balanced_devices, packs or run.data.train
    shard, batch_size, first_batch = _shard_of(run), config.train_batch_size, first_step
    growth, sizes = config.growth, itertools.repeat(batch_size)
    if growth:
        # Read micro-batch by micro-batch: a step is as many of them as it has grown to
        batch_size = config.packs_at_once
        first_batch = growth.packs_before(first_step) // batch_size
        sizes = (int(growth.packs(step)) for step in itertools.count(first_step))
    arrange = None
    if num_devices > 1:
        arrange = functools.partial(
            balance_steps,
            sizes=sizes,
            count_pairs=packs.count_pairs,
            num_devices=num_devices,
            micro_batch_size=config.packs_at_once,
            num_packs=packs.index.num_packs,
            first=first_batch * batch_size,
        )
    packed = input_pipeline.train_batches(
        packs.index,
        packs.spec,
        batch_size,
        config.random_seed,
        config.shuffle_buffer_size,
        first_batch,
        features,
        shard,
        arrange,
    )
    batches = CheckedBatches(packed, packs.files, packs.spec, run.model_config, features)
    if masking:
        batches = MaskedBatches(batches, masking, packs.index, shard, batch_size, first_batch)
    if growth:
        batches = GrowingBatches(batches, growth, first_step)
    return ReadAhead(batches)


def eval_batches(run):
    """Batches of the held-out packs of a `Run`, this process's part of each; none without such packs."""
    packs, features = run.data.eval, run.objective.features
    if not packs.files:
        return ()
    packed = input_pipeline.eval_batches(
        packs.files, packs.spec, run.config.eval_batch_size, features, _shard_of(run), packs.index
    )
    return CheckedBatches(packed, packs.files, packs.spec, run.model_config, features)


def _shard_of(run):
    config, num, index = run.config, run.processes.num, run.processes.index
    if config.layout != "none":
        # The processes that share one copy of the model compute the same packs
        index, num = group_of(index, num, count_replicas(config.layout, config.mesh_shape))
    return ProcessShard(config.packs_at_once, index, num)
