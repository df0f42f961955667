"""Command line: prove on real packs that a model keeps the sequences of a pack apart."""

import sys

from bert_packed.core.command_line import print_table, run
from bert_packed.evaluation.checkpoint_audit import AuditConfig, audit_checkpoint

STATUS_FAILED = 1
DESCRIPTION = """
Audits contamination. It takes real packs, changes one sequence after another, and reports the largest change
and gradient that the others see. Both must be exactly 0. Then it compares outputs, losses, accuracies and
gradients with the same sequences unpacked. Packs of --split_sequences are also taken step by step, as in
training. Each must continue the whole of the pack before it in its row, and nothing else.

Prints a table. Exit status 0: all within tolerance; 1: not.
"""


def main(config):
    """Audit and print; returns an exit status."""
    rows = audit_checkpoint(config)
    print()
    print_table(rows, config.json)
    num_failed = sum(row["result"] != "pass" for row in rows)
    verdict = f"{num_failed} of {len(rows)} checks failed" if num_failed else f"all {len(rows)} checks passed"
    print(f"\n{verdict}")
    return STATUS_FAILED if num_failed else 0


def command():
    """Run `main` with the flags of the command line; returns the exit status."""
    return run(main, AuditConfig, DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
