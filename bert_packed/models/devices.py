"""What kind of devices this process computes on."""

import keras


def computes_on_cpus():
    """Whether no device of this process is anything but a CPU."""
    return all(name.lower().startswith("cpu") for name in keras.distribution.list_devices())
