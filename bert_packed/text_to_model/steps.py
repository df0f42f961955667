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

import dataclasses
import os
import shutil

from bert_packed.core.command_line import parse, print_table, to_flagfile
from bert_packed.core.settings import InputError
from bert_packed.core.storage import exists, lock, make_folder, read_json, remove, write_json, write_text
from bert_packed.evaluation.checkpoint_audit import AuditConfig, audit_checkpoint
from bert_packed.records.inputs import find_files, stamp_files
from bert_packed.records.manifests import read_manifest
from bert_packed.runs.checkpoint_export import export_checkpoint
from bert_packed.runs.export_config import ExportConfig
from bert_packed.runs.pretrain import pretrain
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.schema import MLM
from bert_packed.text_to_model import choices
from bert_packed.text_to_model.config import TrainingResult
from bert_packed.training.engines import choose_backend
from data_gen.pack_config import PackConfig
from data_gen.text.create_config import CreateConfig
from data_gen.text.sources import find_text_sources

SPLITS = ("train", "eval")
NUM_STEPS = 6
SEVERAL_SEQUENCES = 1.0  # more than this packing factor: some pack has several


@dataclasses.dataclass(frozen=True)
class Folders:
    """Paths below an output directory."""

    top: str

    def path(self, *names):
        return os.path.join(self.top, *names)

    @property
    def run(self):
        return self.path("run")

    @property
    def model(self):
        return self.path("model")

    @property
    def vocab_file(self):
        return self.path("instances", "vocab.txt")

    def instance_files(self, split):
        return self.path("instances", f"{split}-*.tfrecord")

    def packed_files(self, split):
        return self.path("packed", split, "*.tfrecord")


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
    sources = find_text_sources(config.input_file)
    stamps = stamp_files(sorted(path for source in sources for path in source.paths))
    folders = Folders(config.output_dir)
    if os.path.isfile(folders.top):
        raise InputError(f"`output_dir` must be a directory. Received: {folders.top}, which is a file.")
    make_folder(folders.top)
    with lock(folders.top, f"`output_dir` is in use by another call. Received: {folders.top}."):
        _begin(config, folders, stamps)
        return _run_steps(config, folders, sum(size for _, size, _ in stamps))


def _begin(config, folders, stamps):
    """Write `train.json`, or compare with that of the call to be continued."""
    path = folders.path("train.json")
    identity = {"settings": config.identity, "text": stamps}
    if not exists(path):
        if others := sorted(os.listdir(folders.top)):
            raise InputError(
                f"`output_dir` must be empty or an earlier call's. Received: {folders.top}, which holds "
                f"{others[0]}."
            )
        write_json(path, identity)
        return
    before = read_json(path)
    if config.overwrite:
        _remove(folders, *(name for name in os.listdir(folders.top) if name != "train.json"))
        write_json(path, identity)
    elif before.get("text") != identity["text"]:
        raise InputError(
            f"`input_file` must be the text that {path} names, as it was, unless --overwrite. "
            "Received: other files, or changed ones."
        )
    elif before.get("settings") != identity["settings"]:
        old = before.get("settings") or {}
        changed = [
            f"{name} {old.get(name)!r} -> {value!r}"
            for name, value in identity["settings"].items()
            if old.get(name) != value
        ]
        raise InputError(
            f"a call must continue as it began, unless --overwrite. Received: {', '.join(changed)}; {path} "
            "has the former."
        )


def _run_steps(config, folders, num_bytes):
    _make_instances(config, folders, num_bytes)
    _make_packs(config, folders)
    if failures := _prove_packs(folders):
        return TrainingResult(folders.top, "", failures=failures)
    if stopped_by := _train_model(config, folders):
        return TrainingResult(folders.top, "", stopped_by)
    if failures := _audit_model(folders):
        return TrainingResult(folders.top, "", failures=failures)
    _export_model(config, folders)
    print(f"\nthe model is in {folders.model}", flush=True)
    return TrainingResult(folders.top, folders.model)


def _make_instances(config, folders, num_bytes):
    output_dir = folders.path("instances")
    if not _is_due(1, "instances", read_manifest(output_dir) is not None):
        return
    from data_gen.text.create_job import create, summarize  # TensorFlow

    _remove(folders, "packed", "proof.json", "audit.json", "model")
    vocab_file = config.vocab_file
    if config.init_checkpoint and not vocab_file:
        from bert_packed.runs.vocabulary import find_vocab  # Keras

        vocab_file = str(find_vocab(config.init_checkpoint))
    created = CreateConfig(
        input_file=config.input_file,
        output_dir=output_dir,
        vocab_file=vocab_file,
        vocab_size=choices.choose_vocab_size(config, num_bytes),
        objective=MLM,
        do_lower_case=config.do_lower_case,
        max_seq_length=config.max_seq_length,
        masked_lm_prob=config.masked_lm_prob,
        dupe_factor=1,  # masks are drawn again in every epoch
        eval_fraction=config.eval_fraction,
        random_seed=config.random_seed,
        num_workers=config.num_workers,
    )
    _write_flags(folders, "create", "create", created)
    print_table(summarize(create(created)))


def _make_packs(config, folders):
    outputs = {split: folders.path("packed", split) for split in SPLITS}
    if not _is_due(2, "packs", all(read_manifest(path) is not None for path in outputs.values())):
        return
    from data_gen.pack_job import metrics_row, pack  # SciPy and HiGHS

    _remove(folders, "proof.json", "audit.json", "model")
    rows = []
    for split, output_dir in outputs.items():
        manifest = read_manifest(output_dir)
        packed = PackConfig(
            input_file=folders.instance_files(split),
            output_dir=output_dir,
            max_seq_length=config.max_seq_length,
            random_seed=config.random_seed,
            num_workers=config.num_workers,
        )
        _write_flags(folders, f"pack-{split}", "pack", packed)
        row = metrics_row(manifest or pack(packed))
        rows.append({"data": split, **{name: row[name] for name in ("sequences", "packs", "lower bound")}})
        rows[-1] |= {name: row[name] for name in ("efficiency %", "packing factor")}
    print_table(rows)


def _prove_packs(folders):
    """Prove that the packs hold every sequence once; returns sentences about what they do not."""
    path = folders.path("proof.json")
    if not _is_due(3, "proof", exists(path)):
        return ()
    from data_gen.verification import compare_files, find_overlong  # TensorFlow

    proof, failures = {}, []
    for split in SPLITS:
        inputs = find_files(folders.instance_files(split), "input_file")
        packs = find_files(folders.packed_files(split), "packed_file")
        result = compare_files(inputs, packs, find_overlong(packs))
        proof[split] = {"input sequences": result.num_input_sequences, "missing": result.num_missing}
        proof[split] |= {"packed sequences": result.num_packed_sequences, "unexpected": result.num_unexpected}
        failures += [*result.differences, *result.false_claims]
    print_table([{"data": split, **row} for split, row in proof.items()])
    if not failures:
        write_json(path, proof)
    return tuple(failures)


def _train_model(config, folders):
    """Train, or go on; returns the signal that stopped it, or 0."""
    if not _is_due(4, "training", exists(folders.path("audit.json"))):
        return 0
    path = folders.path("flags", "pretrain.flags")
    if not exists(path):
        training, chosen = _choose(config, folders)
        print_table([dataclasses.asdict(one) for one in chosen])
        _write_flags(folders, "pretrain", "pretrain", training)
    # As it was chosen, or as a person has changed it since
    training = parse(PretrainingConfig, ["bert-packed", f"--flagfile={path}"])
    return pretrain(training).stopped_by


def _choose(config, folders):
    """`PretrainingConfig` and the list of what was chosen; steps are compiled, and with hours timed."""
    choose_backend()
    # Keras: not before the backend is chosen
    from bert_packed.parallel.targets import devices_here
    from bert_packed.runs.compile_only import compile_largest_program
    from bert_packed.runs.pretraining import time_step
    from bert_packed.training.backend import device_memory_bytes

    manifest = read_manifest(folders.path("packed", "train"))
    training, chosen = choices.choose_training(config, manifest, folders, devices_here().platform)
    memory_bytes = device_memory_bytes()
    if memory_bytes:
        training, choice = choices.fit_memory(training, compile_largest_program(training), memory_bytes)
        chosen.append(choice)
    seconds = time_step(training) if config.train_hours else None
    training, of_steps = choices.choose_steps(config, training, manifest["num_packs"], seconds)
    return training, [*chosen, *of_steps]


def _audit_model(folders):
    """Audit the trained model; returns sentences about the checks that fail."""
    path = folders.path("audit.json")
    if not _is_due(5, "audit", exists(path)):
        return ()
    _remove(folders, "model")
    if read_manifest(folders.path("packed", "train"))["packing_factor"] <= SEVERAL_SEQUENCES:
        print("every pack holds one sequence: there is nothing to leak")
        write_json(path, [])
        return ()
    audit = AuditConfig(input_file=folders.packed_files("train"), init_checkpoint=folders.run)
    _write_flags(folders, "audit", "audit", audit)
    rows = audit_checkpoint(audit)
    print_table(rows)
    failures = tuple(f"{row['name']}: {row['largest']:.3g}" for row in rows if row["result"] != "pass")
    if not failures:
        write_json(path, rows)
    return failures


def _export_model(config, folders):
    if not _is_due(6, "export", exists(folders.model)):
        return
    audit_file = folders.path("audit.json")
    export = ExportConfig(
        init_checkpoint=folders.run,
        output_dir=folders.model,
        vocab_file=folders.vocab_file,
        do_lower_case=config.do_lower_case,
        audit_file=audit_file if read_json(audit_file, list) else "",
    )
    _write_flags(folders, "export", "export", export)
    export_checkpoint(export)


def _is_due(number, name, is_done):
    """Print the heading of a step; returns whether it is to be taken."""
    print(f"\n{number}/{NUM_STEPS} {name}{': done before' if is_done else ''}", flush=True)
    return not is_done


def _write_flags(folders, name, command, config):
    """Write the settings of a step as a flagfile of its command."""
    path = folders.path("flags", f"{name}.flags")
    make_folder(folders.path("flags"))
    write_text(path, f"# bert-packed {command} --flagfile={path}\n{to_flagfile(config)}")


def _remove(folders, *names):
    """Remove files and folders of an earlier call, which later steps made."""
    for name in names:
        path = folders.path(name)
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif exists(path):
            remove(path)
