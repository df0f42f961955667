"""Write docs/reference/flags.md from the settings of all commands: `python -m docs.write_flags`."""

import dataclasses
import re
import textwrap
from pathlib import Path

from bert_packed.cli import COMMANDS
from bert_packed.core.settings import as_text
from bert_packed.tasks.registry import TASKS

PAGE = Path(__file__).resolve().parent / "reference" / "flags.md"
FINETUNING = tuple(TASKS)
SHARED = f"{', '.join(FINETUNING[:-1])} and {FINETUNING[-1]}"
WIDTH = 118
PAGE_NAME = re.compile(r"docs/(\w+)/(\w+\.md)")

HEAD = """\
# Flags

Every flag of every command, by command and group: a page to search. `bert-packed COMMAND --help` shows the
flags that most runs need, `--helpfull` all. `python -m docs.write_flags` writes this page from the settings.

- `--name=value` gives the default; without a value the default is an empty text.
- A flag that is true or false has short forms: `--remat` is `--remat=true`, `--noremat` is `--remat=false`.
- `--flagfile=FILE` reads flags from a file, one a line. Flags given later win. Of a file in `configs/` the
  name is enough: `--flagfile=demo.flags`.
- An unknown flag, or a value that its rule forbids, ends a command with exit status 2 and one line.
- *Advanced* flags are those that `--help` leaves out.

[training.md](../guides/training.md) says which flags of a training to set, and why.
[runs.md](runs.md#what-may-change) lists the flags that may change when a run continues.
"""
FOOT = """\
See also: [training.md](../guides/training.md), [several_devices.md](../guides/several_devices.md),
[fine_tuning.md](../guides/fine_tuning.md), [packing.md](../guides/packing.md), [text.md](../guides/text.md),
[runs.md](runs.md), [api.md](api.md), whose functions take the same names.
"""


def page():
    """The text of docs/reference/flags.md."""
    classes = {name: command.load_config() for name, command in COMMANDS.items()}
    described = {name: groups(name, config_class) for name, config_class in classes.items()}
    shared = {
        heading: [
            entry
            for entry in entries
            if all(entry in described[name].get(heading, ()) for name in FINETUNING)
        ]
        for heading, entries in described[FINETUNING[0]].items()
    }
    for name in FINETUNING:
        described[name] = {
            heading: [entry for entry in entries if entry not in shared.get(heading, ())]
            for heading, entries in described[name].items()
        }
    parts = [HEAD]
    for name, its_groups in described.items():
        if name == FINETUNING[0]:
            about = "Flags that all fine-tuning tasks have, with the same meaning and default."
            parts += [f"## {SHARED}\n\n{about}\n", *write_groups(SHARED, shared)]
        about = COMMANDS[name].about
        more = (
            f", beside the flags of [{SHARED}](#{SHARED.replace(',', '').replace(' ', '-')})"
            if name in FINETUNING
            else ""
        )
        parts += [f"## {name}\n\n{about[0].upper()}{about[1:]}{more}.\n", *write_groups(name, its_groups)]
    return "\n".join([*parts, FOOT])


def groups(name, config_class):
    """A dict from the headings of a command's `--help`, in its order, to the entries of their flags."""
    found, heading = {}, ""
    for field in dataclasses.fields(config_class):
        heading = field.metadata["group"] or heading
        found.setdefault(heading, []).append(entry(field))
    order = list(getattr(config_class, "help_order", found))
    return {heading: found[heading] for heading in sorted(found, key=order.index)}


def write_groups(name, its_groups):
    """Text of a command's groups, a list of flags under each heading."""
    return [
        (f"### {name}: {heading}\n\n" if heading else "") + "\n".join(entries) + "\n"
        for heading, entries in its_groups.items()
        if entries
    ]


def entry(field):
    """A flag of a command as an item of a list."""
    about = field.metadata
    least, most = about["minimum"], about["maximum"]
    limits = f"{least} to {most}" if None not in (least, most) else ""
    if not limits and least is not None:
        limits = f"at least {least}"
    if not limits and most is not None:
        limits = f"at most {most}"
    rules = [
        "required" if about["required"] else "",
        f"one of {', '.join(map(str, about['choices']))}" if about["choices"] else "",
        limits,
        "*advanced*" if about["advanced"] else "",
    ]
    rules = "; ".join(filter(None, rules))
    help_text = PAGE_NAME.sub(r"[\2](../\1/\2)", about["help"])
    text = f"- `--{field.name}={as_text(field.default)}`: {help_text}" + (f" ({rules})" if rules else "")
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


if __name__ == "__main__":
    PAGE.write_text(page())
