"""Command line: pack pre-training records, several sequences per pack, without padding between them."""

import collections
import sys

from bert_packed.cli import run_command
from bert_packed.core.command_line import print_table
from bert_packed.core.storage import write_json


def main(config):
    """Pack, or only plan, and print the papers' metrics."""
    if config.dry_run:
        from data_gen.dry_run import report_choices

        rows, folder = report_choices(config)
        print_table(rows, config.json)
        best = next((row for row in rows if row["recommended"]), None)
        if best is None:
            print(f"none is recommended: every length tried cuts text; pictures in {folder}")
            return
        length, asked = best["max_seq_length"], config.max_seq_length
        total = f", {best['total_speed_up']:.2f} times that of length {asked}" if length != asked else ""
        print(
            f"recommended: --max_seq_length={length} "
            f"--max_sequences_per_pack={best['max_sequences_per_pack']}, {best['packing_factor']:.2f} times "
            f"as fast as unpacked data of that length{total}; pictures in {folder}"
        )
        return
    from bert_packed.core.runtime import keep_freed_memory
    from data_gen.pack_job import metrics_row, pack  # SciPy and HiGHS: not for --help

    keep_freed_memory()
    seconds = collections.defaultdict(dict)
    if config.input_file:
        rows = [metrics_row(pack(config, seconds[""]))]
    else:
        from data_gen.sample_data import pack_sample_corpus  # the tokenizer: only where text is read

        manifests = pack_sample_corpus(config, seconds)
        rows = [{"data": split, **metrics_row(manifest)} for split, manifest in manifests.items()]
    print_table(rows)
    if config.json:
        pairs = zip(rows, seconds.values(), strict=True)
        write_json(config.json, [{**row, "phases": phases} for row, phases in pairs])


if __name__ == "__main__":
    sys.exit(run_command("pack"))
