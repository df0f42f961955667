"""On what kind of devices a program runs."""

import keras


def computes_on_cpus():
    """Whether no device that this process knows of is anything but a CPU."""
    return all(name.lower().startswith("cpu") for name in keras.distribution.list_devices())
