"""What CPU this is, and what it can do."""

import functools


def cpu_name():
    """Model of this machine's CPU."""
    return _cpu().get("model name", "unknown")


@functools.cache
def _cpu():
    """What Linux tells of the first core: dict; {} on other systems."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read().partition("\n\n")[0]
    except OSError:
        return {}
    rows = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in rows}
