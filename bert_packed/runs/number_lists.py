"""Flags that are several numbers, `--mesh` and `--profile_steps`: how they are written, what they mean."""


def parse_profile_steps(text):
    """`--profile_steps`: FIRST,LAST, or nothing."""
    steps = text.split(",")
    if text and not (
        len(steps) == 2 and all(step.isdecimal() for step in steps) and 1 <= int(steps[0]) <= int(steps[1])
    ):
        raise ValueError("empty or two steps, FIRST,LAST, from 1 and in this order")
    return text


def steps_to_profile(text):
    """Range of the steps of a text of `parse_profile_steps`: `"10,12"` -> 10 11 12; empty for none."""
    if not text:
        return range(0)
    first, last = map(int, text.split(","))
    return range(first, last + 1)


def parse_mesh(text):
    """`--mesh`: ROWS,COLUMNS or COPIES,ROWS,COLUMNS, or nothing."""
    sides = text.split(",")
    if text and not (len(sides) in (2, 3) and all(side.isdecimal() and int(side) > 0 for side in sides)):
        raise ValueError("empty, or two or three numbers of devices: ROWS,COLUMNS or COPIES,ROWS,COLUMNS")
    return text


def mesh_shape(text):
    """(copies of the model, rows, columns) of a text of `parse_mesh`: `"2,3"` -> (1, 2, 3); None of ""."""
    if not text:
        return None
    sides = tuple(map(int, text.split(",")))
    return sides if len(sides) == 3 else (1, *sides)
