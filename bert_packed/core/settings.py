"""Settings: default, meaning and rules of each, described once.

Configs are frozen dataclasses whose fields are made by `setting`. From the same description come the
command-line flag (`command_line.py`), the help text, and the check of the value (`check_settings`).

    @dataclasses.dataclass(frozen=True)
    class PackConfig:
        num_shards: int = setting(8, "number of output files", minimum=1)

        def __post_init__(self):
            check_settings(self)
"""

import dataclasses
import functools
import sys
import typing


class InputError(ValueError):
    """A flag, file or record of the user's cannot be used. Entry points print its one line, and end with 2.

    Library code raises it at the boundary only; a wrong argument of ours stays a plain `ValueError`.
    """


def setting(
    default,
    help,
    *,
    minimum=0,
    maximum=None,
    choices=None,
    parse=None,
    required=False,
    only_with=(),
    changeable=False,
    transient=False,
    group="",
    advanced=False,
    positional=False,
):
    """Describe one field of a config dataclass.

    Args:
        default: Value when the flag is not given.
        help: Text of `--help`; units and special values included.
        minimum, maximum: Inclusive limits of a number; None for no limit.
        choices: Sequence of the values allowed.
        parse: Function from the flag's text to the value, for types that absl does not know. Raises
            `ValueError` with the rule. Without it, text on a command line must not begin with "--".
        required: True where text must not be empty.
        only_with: Condition on another setting without which this one must keep its default: "dry_run",
            true or not empty, or "objective=mlm,mlm_nsp", one of these values. A dict from several such
            conditions to their rules replaces the words of the error, in which `{objective}` is a value.
        changeable: True where a stopped run may continue with another value, because the result does not
            depend on it.
        transient: True for the call of a command alone, not its result: left out of resolved flags, and
            changeable.
        group: Heading in `--help` of this setting and of those after it, up to the next that has one.
            Settings under one heading are listed together.
        advanced: True where `--helpfull` shows it and `--help` does not.
        positional: True where arguments without a flag are its value, joined by commas.

    Returns:
        A dataclass field.
    """
    metadata = {
        "help": help,
        "minimum": minimum if type(default) in (int, float) else None,
        "maximum": maximum,
        "choices": choices,
        "parse": parse,
        "required": required,
        "only_with": {only_with: ""} if isinstance(only_with, str) else dict(only_with),
        "changeable": changeable or transient,
        "transient": transient,
        "group": group,
        "advanced": advanced,
        "positional": positional,
    }
    return dataclasses.field(default=default, metadata=metadata)


# `--help` leaves such a setting out
advanced = functools.partial(setting, advanced=True)


def variant(config_class, name, default, **changes):
    """A setting of a base class, for a config that inherits it with another default, or `help` and so on.

    keep_checkpoint_max: int = variant(RunSettings, "keep_checkpoint_max", 1)
    """
    metadata = config_class.__dataclass_fields__[name].metadata
    return setting(default, **{**metadata, **changes})


def result_settings(config):
    """The settings of a config that its result depends on, as a dict: those that are not changeable."""
    fields = [field for field in dataclasses.fields(config) if not field.metadata["changeable"]]
    return {field.name: getattr(config, field.name) for field in fields}


def check_settings(config, given=()):
    """Check every field of a config; raises `InputError` with the field, its rule and the value received.

    Settings that were `given`, as on the command line, need what their `only_with` says at their default too.
    """
    fields = dataclasses.fields(config)
    for field in fields:
        value = getattr(config, field.name)
        rule = _broken_rule(field, value)
        if field.metadata["required"] and not value:
            raise InputError(f"`{field.name}` must be given. Received: nothing.")
        if rule:
            raise InputError(f"`{field.name}` must be {rule}. Received: {value!r}.")
    for field in fields:
        value = getattr(config, field.name)
        if value == field.default and field.name not in given:
            continue
        for condition, rule in field.metadata["only_with"].items():
            if not _is_met(config, condition):
                raise InputError(
                    f"`{field.name}` must {(rule or _only(condition)).format_map(vars(config))}. "
                    f"Received: {value!r}."
                )


def unmet_settings(config):
    """Names of the settings whose `only_with` is not met: the result does not depend on them."""
    fields = dataclasses.fields(config)
    return {f.name for f in fields if not all(_is_met(config, each) for each in f.metadata["only_with"])}


def _is_met(config, condition):
    name, has_values, values = condition.partition("=")
    return as_text(getattr(config, name)) in values.split(",") if has_values else bool(getattr(config, name))


def _only(condition):
    return f"be given with --{condition.replace(',', ' or ')} only"


def as_text(value):
    """A setting's value as on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_divides(config, part, whole):
    """Raise `InputError` unless setting `part` divides setting `whole`; 0, for all of it, always does."""
    if getattr(config, part) and getattr(config, whole) % getattr(config, part):
        raise InputError(
            f"`{part}` must divide `{whole}`. Received: {part}={getattr(config, part)}, "
            f"{whole}={getattr(config, whole)}."
        )


def _broken_rule(field, value):
    """The rule that `value` breaks, as text, or None."""
    limits = field.metadata
    if limits["parse"]:
        try:
            limits["parse"](str(value))
        except ValueError as error:
            return str(error)
        return None
    if limits["choices"] and value not in limits["choices"]:
        return "one of " + ", ".join(str(choice) for choice in limits["choices"])
    kind = field.type if isinstance(field.type, type) else typing.get_origin(field.type)
    # bool is a subclass of int, and True would pass for the number 1
    if kind is int and (not isinstance(value, int) or isinstance(value, bool)):
        return "a whole number"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and not (is_number and abs(value) <= sys.float_info.max):
        return "a finite number"
    if kind is bool and not isinstance(value, bool):
        return "true or false"
    if kind is str and not isinstance(value, str):
        return "text"
    if kind is str and not is_utf8(value):
        return "UTF-8, as file names must be for TensorFlow"
    if limits["minimum"] is not None and value < limits["minimum"]:
        return f"at least {limits['minimum']}"
    if limits["maximum"] is not None and value > limits["maximum"]:
        return f"at most {limits['maximum']}"
    return None


def is_utf8(text):
    """True if text can be written as UTF-8; other bytes of a command line become half characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_depth(text):
    """`--max_sequences_per_pack`: a whole number of at least 1, or the word max (no limit)."""
    if text == "max":
        return "max"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number of at least 1, or the word max")
    return int(text)


def check_depth_fits(max_sequences_per_pack, max_seq_length, length_name="max_seq_length"):
    """Raise `InputError` for more sequences than tokens in a pack."""
    if max_sequences_per_pack != "max" and max_sequences_per_pack > max_seq_length:
        raise InputError(
            f"`max_sequences_per_pack` must be at most {length_name}. Received: "
            f"max_sequences_per_pack={max_sequences_per_pack}, {length_name}={max_seq_length}."
        )
