"""Command line: `bert-packed NAME`, or `python -m bert_packed NAME`, for every command of the package."""

import importlib
import importlib.metadata
import sys

# By name: the module with its `command`, and what that does
COMMANDS = {
    "train": ("bert_packed.train_from_text", "text to a trained, audited model, by one command"),
    "create": ("data_gen.create_pretraining_data", "text to records"),
    "pack": ("data_gen.pack_tfrecords", "records to packs, with a proof of how good the packing is"),
    "verify": ("data_gen.verify_tfrecords", "proof that every sequence is in the packs once"),
    "find": ("data_gen.find_sources", "the records and documents that a pack is made of"),
    "pretrain": ("run_pretraining", "packs to a trained model"),
    "squad": ("run_squad", "fine-tuning on SQuAD"),
    "squad-eval": ("bert_packed.squad_eval", "scores of SQuAD's answers"),
    "glue": ("bert_packed.finetune_glue", "fine-tuning on GLUE"),
    "ner": ("bert_packed.finetune_ner", "fine-tuning to tag words"),
    "audit": ("bert_packed.audit", "proof that no sequence of a pack sees another"),
    "export": ("bert_packed.export", "checkpoints in other forms"),
}


def usage():
    """The names of all commands, as text."""
    lines = [f"  {name:<12}{about}" for name, (_, about) in COMMANDS.items()]
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
    sys.argv = [f"bert-packed {name}", *sys.argv[2:]]
    return importlib.import_module(COMMANDS[name][0]).command()


if __name__ == "__main__":
    sys.exit(main())
