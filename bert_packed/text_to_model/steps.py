"""The steps from text to a model, each left out where an earlier call has done it.

OUTPUT_DIR/
  train.json       settings and text of the call, which a call that continues must share
  flags/           what was chosen, as flagfiles of the single commands
  instances/       records and vocabulary of the text: train and eval
  packed/train/    packs, with the plan and its proof in manifest.json; packed/eval/
  proof.json       every sequence of the instances is in the packs once
  run/             checkpoints and logs
  audit.json       no sequence of a pack sees another
  model/           config.json, model.safetensors and tokenizer, in the form of Hugging Face
"""

import contextlib
import dataclasses
import os

from bert_packed.architectures.registry import MASKED_LM, family_of
from bert_packed.checkpoints import starting_weights
from bert_packed.core.command_line import parse, print_table, to_flagfile
from bert_packed.core.hub import find_model, pin_data_sets
from bert_packed.core.settings import InputError
from bert_packed.core.storage import exists, lock, make_folder, read_json, write_json, write_text
from bert_packed.evaluation.checkpoint_audit import AuditConfig, audit_checkpoint
from bert_packed.records.inputs import find_files, stamp_files
from bert_packed.runs.checkpoint_export import ExportConfig, export_checkpoint
from bert_packed.runs.pretrain import pretrain
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.schema import MLM
from bert_packed.text.vocabularies import TOKENIZER_JSON, file_name, load_maskable
from bert_packed.text_to_model import choices
from bert_packed.text_to_model.config import TrainingResult
from bert_packed.text_to_model.output_folder import CALL_FILE, OutputFolder, begin, describe_text
from bert_packed.training.engines import choose_backend
from data_gen.pack_config import PackConfig
from data_gen.text.create_config import BYTE_BPE, WORDPIECE, CreateConfig
from data_gen.text.sources import find_text_sources

NUM_STEPS = 6
# The audit compares with unpacked sequences. A leak changes a neighbour, for which only 0 passes; this is for
# rounding, which grows with depth: a fault in positions or losses is larger by far
AUDIT_TOLERANCE = 1e-4


def train(config):
    """Make a trained, audited model of text as a `TrainConfig` describes; prints as it goes.

        result = bert_packed.train(bert_packed.TrainConfig(input_file="my_text/*.txt", output_dir="my"))
        vectors = bert_packed.load_encoder(result.model_dir).encode(["one text", "another"])

    The same call continues after a kill, at any point, and leaves out the steps that are done.

    Returns:
        `TrainingResult`. It has `failures` where the proof of the packs or the audit of the model finds a
        fault; then no later step is taken.

    Raises:
        InputError: settings, text or an earlier call in the output directory cannot be used. It is a
            `ValueError`.
        OSError: a file cannot be read or written.
        MemoryError: the devices have too little memory.
    """
    config = dataclasses.replace(config, input_file=pin_data_sets(config.input_file))
    text = describe_text(find_text_sources(config.input_file))
    num_bytes = sum(size for _, size, *_ in text)
    folder = OutputFolder(config.output_dir)
    start = find_model(config.init_checkpoint, folder.begun_start(config.overwrite))
    config = dataclasses.replace(config, init_checkpoint=start)
    check(config, num_bytes)
    if os.path.isfile(folder.top):
        raise InputError(f"`output_dir` must be a directory. Received: {folder.top}, which is a file.")
    make_folder(folder.top)
    try:
        with lock(folder.top, f"`output_dir` is in use by another call. Received: {folder.top}."):
            begin(config, folder, text)
            with _naming_lost_folder(folder):
                return _run_steps(config, folder, num_bytes)
    except KeyboardInterrupt as error:
        error.add_note("the same command continues")
        raise


def check(config, num_bytes):
    """Refuse now what a later step would refuse, after hours of earlier ones; raises `InputError`."""
    choose_backend()
    # These import Keras, which must wait until the backend is chosen
    from bert_packed.checkpoints.export_formats import check_vocabulary
    from bert_packed.kernels.choose import choose_kernels
    from bert_packed.parallel.replicas import check_shares, make_replicas
    from bert_packed.parallel.targets import devices_here
    from bert_packed.runs.vocabulary import known_case
    from bert_packed.training.backend import TRAINING_COPIES, check_memory

    start = config.init_checkpoint
    vocab_file, tokenizer = find_vocabulary(config)
    if vocab_file:
        num_tokens = len(load_maskable(vocab_file))
    else:
        num_tokens = choices.choose_vocab_size(config, num_bytes)
    model_config = _read_model_config(config, num_tokens)
    starting_weights.check_reads(
        model_config, [MASKED_LM], config.max_seq_length, num_tokens, start, config.bert_config_file
    )
    if vocab_file:
        check_vocabulary(vocab_file, model_config)
    if tokenizer == BYTE_BPE and not config.do_lower_case:
        raise InputError(
            "`do_lower_case` must be left out with byte-level BPE, which keeps case. Received: False."
        )
    if start:
        starting_weights.check(start, model_config, MASKED_LM)
        case = known_case(start) if tokenizer == WORDPIECE else None
        if case not in (None, config.do_lower_case):
            raise InputError(
                f"`do_lower_case` must be as in the training of `init_checkpoint`, {case}. "
                f"Received: {config.do_lower_case}."
            )
    check_memory(model_config, TRAINING_COPIES)
    choose_kernels(config.attention, model_config, config.max_seq_length, devices_here().platform)
    check_shares(make_replicas(config.distribution), train_batch_size=config.train_batch_size)


def find_vocabulary(config):
    """Path of the vocabulary of a `TrainConfig`, "" where it is trained, and its kind, of `TOKENIZERS`."""
    from bert_packed.runs.vocabulary import find_vocab

    model_config = _read_model_config(config)
    path, found = "", family_of(model_config).load_names().vocabularies[0]
    if config.vocab_file or config.init_checkpoint:
        path = found = str(find_vocab(config.init_checkpoint, config.vocab_file, model_config))
    return path, BYTE_BPE if file_name(found) == TOKENIZER_JSON else WORDPIECE


def _read_model_config(config, num_tokens=None):
    # If neither is given, both models that may be chosen have as many positions
    model = config.bert_config_file or ("" if config.init_checkpoint else choices.CPU_MODEL)
    return starting_weights.read_model_config(config.init_checkpoint, model, num_tokens)


@contextlib.contextmanager
def _naming_lost_folder(folder):
    """Name the output directory where an error of the block comes from its removal."""
    try:
        yield
    except (InputError, OSError) as error:
        if exists(folder.path(CALL_FILE)):
            raise
        raise InputError(
            f"`output_dir` must stay where it is during the call. Received: {folder.top}, which has lost "
            f"{CALL_FILE}."
        ) from error


def _run_steps(config, folder, num_bytes):
    _make_instances(config, folder, num_bytes)
    _make_packs(config, folder)
    if failures := _prove_packs(config, folder):
        return TrainingResult(folder.top, "", failures=failures)
    if stopped_by := _train_model(config, folder):
        return TrainingResult(folder.top, "", stopped_by)
    if failures := _audit_model(folder):
        return TrainingResult(folder.top, "", failures=failures)
    _export_model(config, folder)
    print(f"\nthe model is in {folder.model}", flush=True)
    return TrainingResult(folder.top, folder.model)


def _make_instances(config, folder, num_bytes):
    output_dir = folder.path("instances")
    if not _is_due(1, "instances", folder.instances_manifest() is not None):
        return
    from data_gen.text.create_job import create, summarize

    folder.remove_after("instances")
    vocab_file, tokenizer = find_vocabulary(config)
    created = CreateConfig(
        input_file=config.input_file,
        text_column=config.text_column,
        output_dir=output_dir,
        vocab_file=vocab_file,
        vocab_size=choices.choose_vocab_size(config, num_bytes),
        objective=MLM,
        tokenizer=tokenizer,
        do_lower_case=config.do_lower_case,
        max_seq_length=config.max_seq_length,
        masked_lm_prob=config.masked_lm_prob,
        dupe_factor=1,  # masks are drawn again in every epoch
        eval_fraction=config.eval_fraction,
        random_seed=config.random_seed,
        num_workers=config.num_workers,
    )
    _write_flags(folder, "create", "create", created)
    print_table(summarize(create(created)))


def _make_packs(config, folder):
    outputs = {split: folder.path("packed", split) for split in config.splits}
    if not _is_due(2, "packs", all(folder.packs_manifest(split) is not None for split in outputs)):
        return
    from data_gen.pack_job import metrics_row, pack  # SciPy and HiGHS

    folder.remove_after("packed")
    rows = []
    for split, output_dir in outputs.items():
        manifest = folder.packs_manifest(split)
        packed = PackConfig(
            input_file=folder.instance_files(split),
            output_dir=output_dir,
            max_seq_length=config.max_seq_length,
            random_seed=config.random_seed,
            num_workers=config.num_workers,
        )
        _write_flags(folder, f"pack-{split}", "pack", packed)
        row = metrics_row(manifest or pack(packed))
        names = ("sequences", "packs", "lower bound", "efficiency %", "packing factor")
        rows.append({"data": split, **{name: row[name] for name in names}})
    print_table(rows)


def _prove_packs(config, folder):
    """Prove that the packs hold every sequence once; returns sentences about what they do not."""
    path = folder.path("proof.json")
    inputs, packs = (
        {split: find_files(files_of(split), "input_file") for split in config.splits}
        for files_of in (folder.instance_files, folder.packed_files)
    )
    # Files that are gone or have changed since need another proof
    files = sorted(path for found in (inputs, packs) for paths in found.values() for path in paths)
    stamps = [[os.path.relpath(one, folder.top), size, time] for one, size, time in stamp_files(files)]
    is_done = exists(path) and read_json(path).get("files") == stamps
    if not _is_due(3, "proof", is_done):
        return ()
    from data_gen.verification import compare_files, find_overlong

    rows, failures = [], []
    for split in config.splits:
        result = compare_files(inputs[split], packs[split], find_overlong(packs[split]))
        row = {"data": split, "input sequences": result.num_input_sequences, "missing": result.num_missing}
        row |= {"packed sequences": result.num_packed_sequences, "unexpected": result.num_unexpected}
        rows.append(row)
        faults = (*result.differences, *result.false_claims)
        failures += [f"the proof of the packs failed: {one}" for one in faults]
    print_table(rows)
    if not failures:
        write_json(path, {"splits": rows, "files": stamps})
    return tuple(failures)


def _train_model(config, folder):
    """Train, or go on; returns the signal that stopped it, or 0."""
    if not _is_due(4, "training", exists(folder.path("audit.json")) and exists(folder.run)):
        return 0
    folder.remove_after("run")
    if exists(folder.training_flags):
        # An earlier call chose it, and a person may have changed it since; its places are those of this call
        training = parse(PretrainingConfig, ["bert-packed", f"--flagfile={folder.training_flags}"])
        places = choices.places_of(config, folder, training.bert_config_file)
        training = dataclasses.replace(training, **places)
    else:
        training, chosen = _choose(config, folder)
        print_table([dataclasses.asdict(one) for one in chosen])
        _write_flags(folder, "pretrain", "pretrain", training)
    return pretrain(training).stopped_by


def _choose(config, folder):
    """`PretrainingConfig` and the list of what was chosen; steps are compiled, and with hours timed."""
    choose_backend()
    # This imports Keras, which must wait until the backend is chosen
    from bert_packed.parallel.replicas import make_replicas
    from bert_packed.parallel.targets import devices_here
    from bert_packed.runs.compile_only import compile_program
    from bert_packed.training.backend import device_memory_bytes

    manifest = folder.packs_manifest("train")
    replicas = make_replicas(config.distribution)
    num_devices = replicas.num if replicas else 1
    platform = devices_here().platform
    training, chosen = choices.choose_training(config, manifest, folder, platform, num_devices)
    memory_bytes, given = device_memory_bytes(), bool(config.train_batch_size)
    if memory_bytes or config.train_hours:
        print("compiling  the step, to know its memory and time: half a minute or more", flush=True)
    if memory_bytes:
        training, choice = choices.fit_memory(
            training, compile_program(training), memory_bytes, given, num_devices
        )
        chosen.append(choice)
    seconds = choices.time_step(training) if config.train_hours else None
    training, of_steps = choices.choose_steps(config, training, manifest, seconds, num_devices)
    return training, [*chosen, *of_steps]


def _audit_model(folder):
    """Audit the trained model; returns sentences about the checks that fail."""
    path = folder.path("audit.json")
    if not _is_due(5, "audit", exists(path)):
        return ()
    if folder.packs_manifest("train")["packing_factor"] <= 1:
        print("every pack holds one sequence: there is nothing to leak")
        folder.remove("model")  # an earlier training's
        write_json(path, [])
        return ()
    audit = AuditConfig(
        input_file=folder.packed_files("train"), init_checkpoint=folder.run, tolerance=AUDIT_TOLERANCE
    )
    _write_flags(folder, "audit", "audit", audit)
    rows = audit_checkpoint(audit)
    print_table(rows)
    failures = tuple(
        f"the audit failed, and no model is exported: {row['name']} is {row['largest']:.3g}, and must be at "
        f"most {row['tolerance']:g}"
        for row in rows
        if row["result"] != "pass"
    )
    if not failures:
        folder.remove("model")
        write_json(path, rows)
    return failures


def _export_model(config, folder):
    if not _is_due(6, "export", exists(folder.model)):
        return
    audit_file = folder.path("audit.json")
    export = ExportConfig(
        init_checkpoint=folder.run,
        output_dir=folder.model,
        vocab_file=folder.vocab_file,
        do_lower_case=config.do_lower_case,
        audit_file=audit_file if read_json(audit_file, list) else "",
    )
    _write_flags(folder, "export", "export", export)
    export_checkpoint(export)


def _is_due(number, name, is_done):
    """Print the heading of a step; returns whether it is to be taken."""
    print(f"\n{number}/{NUM_STEPS} {name}{': done before' if is_done else ''}", flush=True)
    return not is_done


def _write_flags(folder, name, command, config):
    """Write the settings of a step as a flagfile of its command."""
    path = folder.path("flags", f"{name}.flags")
    # The folders above are not made: where they are gone, the next call would refuse what it finds
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder.path("flags"))
    write_text(path, f"# bert-packed {command} --flagfile={path}\n{to_flagfile(config)}")
