"""Entry points: flags from a config dataclass, and one line with exit status 2 for a user's mistake.

Entry points import their heavy modules inside `main`, so that `--help` and mistakes in flags answer at once.
"""

import contextlib
import dataclasses
import inspect
import logging
import os
import signal
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

from absl import flags
from tabulate import tabulate

from bert_packed.core.hub import recorded_flags
from bert_packed.core.settings import InputError, as_text, unmet_settings
from bert_packed.core.storage import PARTIAL_SUFFIX, is_remote, write_json

TOP = Path(__file__).resolve().parents[2]
# `setup.py` copies the folder into the package; a checkout has it at its top
CONFIG_FOLDER = next(filter(Path.is_dir, (TOP / "bert_packed" / "configs", TOP / "configs")), TOP / "configs")
PARSERS = {  # of types: the function of a text, and the rule that its error says
    bool: (flags.BooleanParser().parse, "true or false"),
    int: (flags.IntegerParser().parse, "a whole number"),
    float: (flags.FloatParser().parse, "a number"),
    str: (str, ""),
}
HELP_FLAGS = {"--help", "-h", "-help", "--helpshort", "--helpfull"}
SECONDS_TO_INTERRUPT = 0.05
OUTPUT_FLAGS = ("json", "picture", "markdown")  # files that a command writes at its end
TRIAL_SUFFIX = 24 * "0" + PARTIAL_SUFFIX  # while it is written, a file has a longer name by as much
STATUS_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# TensorFlow's log of a healthy start would bury the one line of a mistake. A user's own value wins.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def run(main, config_class, argv=None):
    """Parse flags into a config, run `main` with it, and turn mistakes into one line; returns the status.

    0 is success, 2 a user's mistake or an operating-system error, 130 an interrupt, others are the result
    of `main`. Started with SIGINT ignored, as by `command &` in a script, it is never interrupted; SIGTERM
    ends it.
    """
    argv = sys.argv if argv is None else argv
    program = Path(argv[0]).name
    if asked := HELP_FLAGS.intersection(argv[1:]):
        _print_help(help_text(program, config_class, "--helpfull" in asked))
        return 0
    _show_log()
    try:
        with _interrupts_repeated():
            return main(parse(config_class, argv)) or 0
    except (InputError, OSError, MemoryError) as error:
        print(f"{program}: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"{program}: {'; '.join(['interrupted', *getattr(error, '__notes__', [])])}", file=sys.stderr)
        return STATUS_INTERRUPTED


def _print_help(text):
    """Print text whose reader, such as `head`, may stop early; that is no mistake."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes once more at its end, and would complain then
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _interrupts_repeated():
    """Interrupt once more where Ctrl-C fell into code that cannot raise.

    In a `__del__` or a callback of the garbage collector Python prints the interrupt and drops it. JAX, which
    TensorFlow imports where it is installed, has such a callback, and while texts are parsed nearly every
    Ctrl-C falls into it.
    """
    before = sys.unraisablehook

    def hook(unraisable):
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        # Another thread interrupts, after this: raised in here, the interrupt would be dropped again
        main_thread = threading.main_thread().ident
        again = threading.Timer(SECONDS_TO_INTERRUPT, signal.pthread_kill, (main_thread, signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def parse(config_class, argv):
    """Parse `argv` (program name first; `--flagfile` allowed) into a `config_class`; raises `InputError`."""
    values = _define(config_class)
    try:
        extra = values([argv[0], *_find_flagfiles(argv[1:])])[1:]
    except flags.Error as error:
        # absl puts its own words around the error of a parser
        mistake = error.__context__ if isinstance(error.__context__, InputError) else error
        raise InputError(_one_line(mistake)) from error
    positional = _positional(config_class)
    if extra and not positional:
        raise InputError(f"every argument must be a flag, --name=value. Received: {extra[0]!r}.")
    if extra and values[positional].present:
        raise InputError(f"`{positional}` must be given once. Received: a flag, and {extra[0]!r}.")
    if extra:
        values[positional].value = ",".join(extra)
    fields = dataclasses.fields(config_class)
    for field in fields:
        value, has_own_rule = values[field.name].value, field.metadata["parse"]
        # If a value is forgotten, absl takes the next flag for it
        if not has_own_rule and isinstance(value, str) and value.startswith("--"):
            raise InputError(f"`{field.name}` must not begin with --, as a flag does. Received: {value!r}.")
    names = [field.name for field in fields]
    config = config_class(**{name: values[name].value for name in names})
    if hasattr(config, "check_given"):  # some mistakes are only seen here: a default may have been given
        config.check_given({name for name in names if values[name].present})
    for name in OUTPUT_FLAGS:
        _check_output_file(name, getattr(config, name, ""))
    return config


def _positional(config_class):
    """The name of the setting that takes arguments without a flag, or ""."""
    names = (field.name for field in dataclasses.fields(config_class) if field.metadata["positional"])
    return next(names, "")


def _check_output_file(flag, path):
    """Raise `InputError` where a local file could not be written: now, not when the work is done."""
    if not path:
        return
    rule = f"`{flag}` must be a file to write. Received: {path!r}"
    if is_remote(path):
        raise InputError(f"{rule}, a URL.")
    if os.path.exists(path) and not os.path.isfile(path):  # a device would be replaced, as a file is
        raise InputError(f"{rule}, {'a directory' if os.path.isdir(path) else 'no file'}.")
    if not os.path.basename(path):
        raise InputError(f"{rule}, a directory.")
    folder = Path(path).absolute().parent
    while not folder.exists():  # those that are missing are made with the file
        folder = folder.parent
    try:
        # only a trial shows it: a folder's mode does not hold for everyone, nor on every file system
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{Path(path).name}.", suffix=TRIAL_SUFFIX):
            pass
    except OSError as error:
        raise InputError(f"{rule}: {error.strerror} in {folder}.") from error


def help_text(program, config_class, is_full=True):
    """The text of `--help`: description, then by group every flag with meaning, rule and default.

    Groups are in the order of their first settings, or of the class's `help_order`, a list of headings.
    Advanced settings are left out, and counted in a last line, unless `is_full`.
    """
    positional = f"{_positional(config_class).upper()} ... ".removeprefix(" ... ")
    usage = f"usage: {program} {positional}[--flagfile=FILE] [--name=value ...]"
    lines = [inspect.getdoc(config_class), "", usage]
    fields = dataclasses.fields(config_class)
    shown = [field for field in fields if is_full or not field.metadata["advanced"]]
    groups, heading = {}, ""
    for field in fields:
        heading = field.metadata["group"] or heading
        groups.setdefault(heading, []).extend([field] if field in shown else [])
    order = list(getattr(config_class, "help_order", groups))
    for heading in sorted(groups, key=order.index):
        if its_fields := groups[heading]:
            lines += ["", *([f"{heading}:"] if heading else [])]
            lines += [line for field in its_fields for line in _describe(field)]
    if len(shown) < len(fields):
        lines += ["", f"{len(fields) - len(shown)} advanced flags are hidden; --helpfull shows them."]
    return "\n".join(lines)


def _describe(field):
    choices, default = field.metadata["choices"], as_text(field.default)
    about = field.metadata["help"] + (f" (one of {', '.join(map(str, choices))})" if choices else "")
    remark = "required" if field.metadata["required"] else f"default: {default}" if default else ""
    indent = 6 * " "
    return [
        f"  --{field.name}" + (f" ({remark})" if remark else ""),
        *textwrap.wrap(about, 96, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False),
    ]


def to_flagfile(config):
    """The resolved config as the text of a flagfile, one line a flag.

    Transient settings are left out, and those without effect, which a command would refuse.
    """
    unused = unmet_settings(config)
    fields = [field for field in dataclasses.fields(config) if not field.metadata["transient"]]
    names = [field.name for field in fields if field.name not in unused]
    values = recorded_flags(config)
    return "".join(f"--{name}={as_text(values[name])}\n" for name in names)


def print_table(rows, json_file=""):
    """Print rows, dicts with equal keys, as a table; write them, unrounded, as JSON if a file is named."""
    print(tabulate(rows, headers="keys", floatfmt=".6g", intfmt=",", disable_numparse=[0] if rows else []))
    if json_file:
        write_json(json_file, rows)


class _StandardError(logging.StreamHandler):
    """Writes to the present `sys.stderr`: a program that calls `run` may replace it in between."""

    @property
    def stream(self):
        return sys.stderr

    @stream.setter
    def stream(self, _):
        """Ignored: the parent class sets the stream of its construction."""


def _show_log():
    """Show the log of library code, such as a job's summary, on standard error."""
    for name in ("bert_packed", "data_gen"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            handler = _StandardError()
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            logger.propagate = False  # or a library that logs too would show every line twice


def _define(config_class):
    values = flags.FlagValues()
    values.set_gnu_getopt()  # flags may follow other arguments
    for field in dataclasses.fields(config_class):
        name, default, about = field.name, field.default, field.metadata["help"]
        parse, rule = (field.metadata["parse"], "") if field.metadata["parse"] else PARSERS[field.type]
        parser = _TextParser(name, parse, rule)
        if field.type is bool:
            flags.DEFINE_boolean(name, default, about, flag_values=values)
            values[name].parser = parser
            continue
        flags.DEFINE(parser, name, default, about, values, flags.ArgumentSerializer())
    return values


class _TextParser(flags.ArgumentParser):
    def __init__(self, name, parse, rule):
        super().__init__()
        self._name, self._parse, self._rule = name, parse, rule

    def parse(self, argument):
        try:
            return self._parse(str(argument))
        except ValueError as error:
            rule = self._rule or error
            raise InputError(f"`{self._name}` must be {rule}. Received: {argument!r}.") from error


def _find_flagfiles(arguments):
    """Let `--flagfile=NAME` or `--flagfile NAME`, or `configs/NAME`, be found in `CONFIG_FOLDER` as well."""
    found = []
    for argument in arguments:
        name, separator, path = argument.rpartition("=")
        names_file = {"--flagfile", "-flagfile"} & {name, found[-1] if found else ""}
        packaged = CONFIG_FOLDER / path.removeprefix("configs/")
        if names_file and not Path(path).exists() and packaged.is_file():
            path = str(packaged)
        found.append(name + separator + path)
    return found


def _one_line(error):
    """An error's message and its notes, without line breaks."""
    notes = getattr(error, "__notes__", [])
    return " ".join("; ".join([str(error) or type(error).__name__, *notes]).split())
