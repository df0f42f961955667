"""Steps of tensorflow-addons' LAMB on fixed gradients: writes the `params` of lamb_tfa_golden.json again.

tensorflow-addons cannot be installed beside the TensorFlow of this project, so it needs a separate
environment, with Python 3.11:

    python3.11 -m venv tfa && tfa/bin/pip install "tensorflow==2.15.*" "tensorflow-addons==0.23.*"
    tfa/bin/python tests/data/make_lamb_tfa_golden.py

Initial values, gradients and settings are read from the file. Prints the largest difference from the
parameters that it held, and exits with status 1 where it is above 0.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
import tensorflow_addons as tfa

FILE = Path(__file__).with_name("lamb_tfa_golden.json")


def take_steps(config, init, gradients):
    """Parameters after every step: list of dicts from name to nested lists."""
    optimizer = tfa.optimizers.LAMB(**config)
    variables = {name: tf.Variable(np.array(value, np.float32), name=name) for name, value in init.items()}
    steps = []
    for step in gradients:
        pairs = [(tf.constant(step[name], tf.float32), variable) for name, variable in variables.items()]
        optimizer.apply_gradients(pairs)
        steps.append({name: variable.numpy().tolist() for name, variable in variables.items()})
    return steps


def main():
    golden = json.loads(FILE.read_text())
    difference = 0.0
    for run in golden["runs"]:
        before, run["params"] = run["params"], take_steps(run["config"], golden["init"], golden["gradients"])
        for old, new in zip(before, run["params"], strict=True):
            differences = [np.abs(np.subtract(old[name], new[name])).max() for name in golden["shapes"]]
            difference = max(difference, *differences)
    FILE.write_text(json.dumps(golden))
    print(f"largest difference {difference:g} over {len(golden['runs'])} runs")
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
