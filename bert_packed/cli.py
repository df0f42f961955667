"""Command line: one table of all commands, and what each prints and returns.

`bert-packed NAME`, `python -m bert_packed NAME`, and the scripts of the checkout run the same rows.
"""

import dataclasses
import importlib.metadata
import pkgutil
import sys
from collections.abc import Callable

from bert_packed.core.command_line import print_table, run
from bert_packed.tasks.registry import TASKS

INPUTS = "input_file", "eval_input_file", "unpacked_input_file"
STATUS_FAILED = 1  # of an audit: a check has failed
# The run is complete and reported, but its speed could not be compared
STATUS_NOT_COMPARED = 3


@dataclasses.dataclass(frozen=True)
class Command:
    """A row of the table; module and name, as "package.module:name", are imported when the command runs."""

    about: str  # a line of the list of commands
    config: str  # the class of its settings, whose docstring heads `--help`
    function: str  # from such a config to an exit status; None is 0

    def load_config(self):
        """The class of the settings."""
        return pkgutil.resolve_name(self.config)

    def load_function(self) -> Callable:
        """The function that does the work."""
        return pkgutil.resolve_name(self.function)


COMMANDS = {
    "train": Command(
        "text to a trained, audited model, by one command",
        "bert_packed.text_to_model.config:TrainConfig",
        "bert_packed.cli:train",
    ),
    "create": Command(
        "text to records",
        "data_gen.text.create_config:CreateConfig",
        "data_gen.create_pretraining_data:main",
    ),
    "pack": Command(
        "records to packs, with a proof of how good the packing is",
        "data_gen.pack_config:PackConfig",
        "data_gen.pack_tfrecords:main",
    ),
    "verify": Command(
        "proof that every sequence is in the packs once",
        "data_gen.verify_tfrecords:VerifyConfig",
        "data_gen.verify_tfrecords:main",
    ),
    "find": Command(
        "the records and documents that a pack is made of",
        "data_gen.find_sources:SourcesConfig",
        "data_gen.find_sources:main",
    ),
    "pretrain": Command(
        "packs to a trained model",
        "bert_packed.runs.pretraining_config:PretrainingConfig",
        "bert_packed.cli:pretrain",
    ),
    **{
        name: Command(task.about, task.config, f"bert_packed.cli:{task.command}")
        for name, task in TASKS.items()
    },
    "squad-eval": Command(
        "scores of SQuAD's answers",
        "bert_packed.tasks.squad.scores:EvalConfig",
        "bert_packed.tasks.squad.scores:evaluate",
    ),
    "audit": Command(
        "proof that no sequence of a pack sees another",
        "bert_packed.evaluation.checkpoint_audit:AuditConfig",
        "bert_packed.cli:audit",
    ),
    "audit-hf": Command(
        "which ways of giving packs to a model of transformers are exact",
        "bert_packed.torch.audit_hf:AuditHFConfig",
        "bert_packed.torch.audit_hf:main",
    ),
    "export": Command(
        "checkpoints in other forms",
        "bert_packed.runs.checkpoint_export:ExportConfig",
        "bert_packed.runs.checkpoint_export:export_checkpoint",
    ),
}


def usage():
    """The names of all commands, as text."""
    lines = [f"  {name:<12}{command.about}" for name, command in COMMANDS.items()]
    ends = "usage: bert-packed COMMAND [--name=value ...]", "bert-packed COMMAND --help explains one."
    return "\n".join([ends[0], "", *lines, "", ends[1]])


def main():
    """Run the command that the first argument names; returns its exit status."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h", "--helpfull", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"bert_packed {importlib.metadata.version('bert_packed')}")
        return 0
    if name not in COMMANDS:
        print(
            f"bert-packed: error: the command must be one of {', '.join(COMMANDS)}. Received: {name!r}.",
            file=sys.stderr,
        )
        return 2
    return run_command(name, [f"bert-packed {name}", *sys.argv[2:]])


def run_command(name, argv=None):
    """Run a command of the table on program name and arguments, default `sys.argv`: its exit status."""
    command = COMMANDS[name]
    # The function loads after the flags: its imports take seconds, which `--help` and mistakes need not wait
    return run(lambda config: command.load_function()(config), command.load_config(), argv=argv)


def train(config):
    """Text to a model; prints each fault that the proof or the audit has found."""
    from bert_packed.text_to_model import steps

    result = steps.train(config)
    for sentence in result.failures:
        print(sentence, file=sys.stderr)
    return result.exit_status


def pretrain(config):
    """Train, evaluate and report one run, or compile its step."""
    from bert_packed.records.inputs import find_files
    from bert_packed.training.engines import choose_backend

    # TensorFlow's import takes seconds, so files are looked for first; but in a cluster only after all have
    # met, or the others would wait for a process that has left
    if not config.sample_data and config.distribution != "multi_worker":
        for name in INPUTS:
            if getattr(config, name):
                find_files(getattr(config, name), name)
    prepare = None
    if config.sample_data:
        from data_gen.sample_data import build_missing as prepare
    if config.compile_only:
        backend = choose_backend()
        from bert_packed.runs.compile_only import compile_run  # TensorFlow: only now

        if prepare:
            prepare()
        return compile_run(config, backend)
    from bert_packed.runs.pretrain import pretrain as train_model

    result = train_model(config, prepare)
    if result.stopped_by:
        return 128 + result.stopped_by
    if result.not_compared:
        print(f"the run is complete; its speed could not be compared: {result.not_compared}", file=sys.stderr)
        return STATUS_NOT_COMPARED
    return 0


def fine_tune(config):
    """Train, predict and score."""
    from bert_packed.tasks.registry import finetune

    return finetune(config).exit_status


def squad(config):
    """Fine-tune on SQuAD; without files, on the questions about this project."""
    config = config.resolved()
    if config.is_sample:
        from data_gen.sample_data import QUESTIONS_FILE, build_vocabulary

        vocab_file, model = config.vocab_file, config.bert_config_file
        # A checkpoint's ids mean the WordPieces of the vocabulary beside it
        if not config.init_checkpoint:
            vocab_file = vocab_file or build_vocabulary(config.do_lower_case)
            model = model or "bert-tiny"
        files = dict.fromkeys(("train_file", "predict_file"), str(QUESTIONS_FILE))
        config = dataclasses.replace(config, **files, vocab_file=vocab_file, bert_config_file=model)
    return fine_tune(config)


def audit(config):
    """Audit a checkpoint and print a row for each check."""
    from bert_packed.evaluation.checkpoint_audit import audit_checkpoint

    rows = audit_checkpoint(config)
    print()
    print_table(rows, config.json)
    num_failed = sum(row["result"] != "pass" for row in rows)
    verdict = f"{num_failed} of {len(rows)} checks failed" if num_failed else f"all {len(rows)} checks passed"
    print(f"\n{verdict}")
    return STATUS_FAILED if num_failed else 0
