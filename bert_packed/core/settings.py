"""How a setting is described once: its default, its meaning and its rule.

Configs are frozen dataclasses whose fields are made by `setting`. From the same description come the
command-line flag (`command_line.py`), the help text, and the check of the value (`check_settings`).

    @dataclasses.dataclass(frozen=True)
    class PackConfig:
        num_shards: int = setting(8, "number of output files", minimum=1)

        def __post_init__(self):
            check_settings(self)
"""

import dataclasses
import math
import typing


class InputError(ValueError):
    """What the user gave cannot be used: a flag, a file or a record. Its message is one clear line.

    Entry points print it and exit with status 2. Library code raises it at the boundary only; a wrong
    argument between our own functions stays a plain `ValueError`.
    """


def setting(
    default,
    help,
    *,
    minimum=None,
    maximum=None,
    choices=None,
    parse=None,
    changeable=False,
    transient=False,
):
    """Describe one field of a config dataclass.

    Args:
        default: Value when the flag is not given.
        help: What the setting does, for `--help`; units and special values included.
        minimum, maximum: Inclusive limits of a number.
        choices: Sequence of the values allowed.
        parse: Function from the flag's text to the value, for types that absl does not know. Raises
            `ValueError` with the rule.
        changeable: True where a stopped run may continue with another value, because the result does not
            depend on it.
        transient: True where it says how to call a command, not what it makes: left out of resolved flags.
            What is transient is changeable too.

    Returns:
        A dataclass field.
    """
    rules = {"help": help, "minimum": minimum, "maximum": maximum, "choices": choices, "parse": parse}
    rules |= {"changeable": changeable or transient, "transient": transient}
    return dataclasses.field(default=default, metadata=rules)


def result_settings(config):
    """The settings of a config that its result depends on, as a dict: those that are not changeable."""
    fields = [field for field in dataclasses.fields(config) if not field.metadata["changeable"]]
    return {field.name: getattr(config, field.name) for field in fields}


def check_settings(config):
    """Check every field of a config against its type and rule.

    Raises:
        InputError: naming the field, the rule and the value received.
    """
    for field in dataclasses.fields(config):
        check_value(field, getattr(config, field.name))


def check_divides(config, part, whole):
    """Check that one setting divides another; 0 divides everything, as "all of it" does.

    Args:
        config: Dataclass.
        part, whole: Names of two of its fields.

    Raises:
        InputError: naming both and the values received.
    """
    if getattr(config, part) and getattr(config, whole) % getattr(config, part):
        raise InputError(
            f"`{part}` must divide `{whole}`. Received: {part}={getattr(config, part)}, "
            f"{whole}={getattr(config, whole)}."
        )


def check_value(field, value):
    """Check one value against the rule of its dataclass field; raises `InputError`."""
    rule = _broken_rule(field, value)
    if rule:
        raise InputError(f"`{field.name}` must be {rule}. Received: {value!r}.")


def _broken_rule(field, value):
    """The rule that `value` breaks, in words, or None."""
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
    if kind is float and not (is_number and math.isfinite(value)):
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
    """Whether text can be written as UTF-8: a command line's bytes that are none become half characters."""
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
    """Raise `InputError` where a pack was to hold more sequences than tokens, which none ever does."""
    if max_sequences_per_pack != "max" and max_sequences_per_pack > max_seq_length:
        raise InputError(
            f"`max_sequences_per_pack` must be at most {length_name}. Received: "
            f"max_sequences_per_pack={max_sequences_per_pack}, {length_name}={max_seq_length}."
        )
