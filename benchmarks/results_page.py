"""Tables of docs/evidence/results.md, from the JSON files that benchmarks wrote into docs/evidence/data.

python -m benchmarks.results_page             # write the tables into the page
python -m benchmarks.results_page --check     # exit status 1 where the page has others
python -m benchmarks.results_page --commands  # the measurements, with their minutes

To add a measurement: run its command on an idle machine in a clean checkout, commit the JSON, write the page.
"""

import dataclasses
import importlib
import re
import shlex
import sys
from pathlib import Path

from benchmarks.measurements import MEASUREMENTS
from benchmarks.page_pictures import PICTURES
from benchmarks.results import Settings
from bert_packed.core.command_line import OUTPUT_FLAGS, parse, run
from bert_packed.core.progress import count_of
from bert_packed.core.settings import InputError, check_settings, setting
from bert_packed.core.storage import read_json, read_text, write_text

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/evidence/results.md"
DATA = "docs/evidence/data"
MOST_ROWS = 8  # of a table, since a page is for answers
COMMAND_WIDTH = 100  # of a line of a command
MACHINES = "machines"  # the block with a row for each file


@dataclasses.dataclass(frozen=True)
class PageConfig:
    """Writes the tables and draws the bars of docs/evidence/results.md, each from JSON that a benchmark
    wrote with --json and that is committed in docs/evidence/data. A table has its machine, date, commit
    and command below. A measurement without JSON has its command alone.
    """

    check: bool = setting(False, "write nothing; exit status 1 where the page has other tables")
    commands: bool = setting(False, "print the measuring commands with their minutes, and write nothing")

    def __post_init__(self):
        check_settings(self)


def main(config):
    """Write, check or list; returns the exit status."""
    if config.commands:
        for one in MEASUREMENTS:
            state = "there" if (ROOT / DATA / f"{one.name}.json").exists() else "to do"
            print(f"# {one.name}: {one.minutes} minutes, {state}")
            if one.before:
                print(one.before if one.before.startswith("MODEL=") else f"# First {one.before}")
            print(f"{one.line} --json={DATA}/{one.name}.json\n")
        return 0
    path = str(ROOT / PAGE)
    text = read_text(path)
    data = read_data(ROOT / DATA)
    wanted = written(text, data)
    if config.check:
        print(f"{PAGE} {'is as its data' if wanted == text else 'has other tables than its data'}")
        return int(wanted != text)
    write_text(path, wanted)
    for picture in PICTURES:
        draw(picture, data)
    return 0


def read_data(folder):
    """JSON of measurements in a folder, by name; raises `InputError` where one cannot be used."""
    found = {}
    known = {one.name: one for one in MEASUREMENTS}
    for path in sorted(Path(folder).glob("*.json")):
        if path.stem not in known:
            raise InputError(f"{path}: must be named after a measurement, {', '.join(known)}.")
        found[path.stem] = read_json(str(path))
        check_content(path, known[path.stem], found[path.stem])
    return found


def amounts(picture, data):
    """Bars of a picture, from its label to a color's key and a number; those that were measured."""
    return {
        label: (kind, data[name]["tables"][table][row][column])
        for label, (kind, name, table, row, column) in picture.bars.items()
        if name in data
    }


def draw(picture, data):
    """Draw a picture of the page as PNG."""
    from benchmarks.pictures import draw_amounts, new_figure, save_picture

    figure, ((axes,),) = new_figure(1, size=(6.4, 0.5 + 0.35 * len(picture.bars)))
    draw_amounts(axes, amounts(picture, data))
    axes.set(xlabel=picture.title, xticks=[])  # each bar has its number
    save_picture(figure, ROOT / f"docs/pictures/{picture.name}.png")


def check_content(path, measurement, content):
    """Raise `InputError` unless a JSON names machine, date and commit, and is of the page's command."""
    machine = content["machine"]
    for name in ("cpu", "cores", "date", "commit"):
        if not machine.get(name):
            raise InputError(f"{path}: machine.{name} must be there. Received: {machine.get(name)!r}.")
    if machine["commit"].endswith("+"):
        raise InputError(
            f"{path}: machine.commit must be of a clean checkout. Received: {machine['commit']}."
        )
    wanted, settings = settings_of(measurement), content["settings"]
    # A setting that the command no longer has says nothing
    for name in (settings.keys() & wanted.keys()) - set(OUTPUT_FLAGS):
        value = wanted.get(name)
        if "$" not in str(value) and settings[name] != value:  # a shell's variable may be anything
            raise InputError(f"{path}: `{name}` must be {value!r}. Received: {settings[name]!r}.")


def settings_of(measurement):
    """The settings of a measurement's command: dict."""
    module = importlib.import_module(measurement.module)
    (config_class,) = (
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, Settings) and one.__module__ == module.__name__
    )
    argv = [
        flag
        for flag in shlex.split(measurement.command)
        if not flag.startswith(("--picture=", "--markdown="))
    ]
    return dataclasses.asdict(parse(config_class, argv))


def written(text, data):
    """The page's text with all its blocks written anew; raises `InputError` where blocks are missing."""
    blocks = {MACHINES: machines_block(data)}
    for one in MEASUREMENTS:
        for number, (name, table) in enumerate(one.tables.items()):
            blocks[name] = measurement_block(one, table, data.get(one.name), number == 0)
    there = re.findall(r"^<!-- table: (.*) -->$", text, re.MULTILINE)
    if sorted(there) != sorted(blocks):
        raise InputError(f"{PAGE} must have a block for each of {sorted(blocks)}. Received: {sorted(there)}.")
    for name, block in blocks.items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        head, _, rest = text.partition(start)
        text = head + start + block + end + rest.partition(end)[2]
    return text


def measurement_block(measurement, table, content, has_command):
    """A table with its origin below it, and the command where it is the measurement's first."""
    text = ""
    if content:
        text = f"\n{markdown_table(chosen_rows(table, content))}\n\n{origin(content)}\n"
    if has_command:
        text += f"\n{wrapped(measurement.line)}\n"
    return text + "\n"


def chosen_rows(table, content):
    """Rows of the page: list of lists, the titles first."""
    rows = content["tables"][table.name]
    first = next(iter(table.columns))
    if table.ratios:
        ratios = {one["figure"]: one for one in content["tables"][table.ratios]}
        none = dict.fromkeys(table.columns)
        rows = [none | ratios.get(f"speed-up over {row[first]}", {}) | row for row in rows]
    if table.rows is not None:
        found = {}
        for row in rows:  # of several the first counts
            found.setdefault(" ".join(str(row[name]) for name in table.by or (first,)), row)
        rows = [{**found[key], first: text} for key, text in table.rows.items() if key in found]
    rows = rows[:MOST_ROWS]
    return [
        [*table.columns.values()],
        *([shown(row[name], table.digits) for name in table.columns] for row in rows),
    ]


def shown(value, digits):
    """A value of a table in the digits that count."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def markdown_table(rows):
    """A table in Markdown, of lists of texts, the titles first."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def origin(content):
    """Machine, date and commit of a JSON: a sentence."""
    machine = content["machine"]
    is_estimate = content["benchmark"] in ("forecast", "block_cycles")
    what = "Estimated by the devices' compilers" if is_estimate else "Measured"
    return f"{what} on {machine_name(content)}; {machine['date']}, commit {machine['commit']}."


def machine_name(content):
    """The accelerator, or the CPU with its cores."""
    machine = content["machine"]
    return machine.get("device") or f"{count_of(machine['cores'], 'core')} of {machine['cpu']}"


def machines_block(data):
    """A row for each file, which has the versions of packages too."""
    if not data:
        return "\n"
    rows = [["file", "machine", "backend", "date", "commit"]]
    for name, content in data.items():
        machine, file = content["machine"], f"[{name}](data/{name}.json)"
        rows.append([file, machine_name(content), machine["backend"], machine["date"], machine["commit"]])
    return f"\n{markdown_table(rows)}\n\n"


def wrapped(command):
    """A command in lines that a shell joins, indented as code."""
    lines = [""]
    for part in re.split(r" (?=--\w+=)", command):
        if lines[-1] and len(lines[-1]) + len(part) > COMMAND_WIDTH:
            lines.append("")
        lines[-1] += f" {part}" if lines[-1] else part
    return " \\\n".join("    " * (1 if number == 0 else 2) + line for number, line in enumerate(lines))


if __name__ == "__main__":
    sys.exit(run(main, PageConfig))
