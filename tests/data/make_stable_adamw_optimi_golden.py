"""Steps of torch-optimi's StableAdamW on fixed gradients: writes stable_adamw_optimi_golden.json again.

    python -m venv optimi && optimi/bin/pip install "torch-optimi==0.3.3" numpy
    optimi/bin/python tests/data/make_stable_adamw_optimi_golden.py

Prints the largest difference from the parameters that the file held, and exits with status 1 where it is
above 0.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from optimi import StableAdamW

FILE = Path(__file__).with_name("stable_adamw_optimi_golden.json")
SHAPES = {
    "encoder/embeddings": (5, 3),
    "encoder/dense/kernel": (3, 4),
    "encoder/dense/bias": (4,),
    "encoder/LayerNorm/gamma": (4,),
}
NOT_DECAYED = ("bias", "LayerNorm")
# Gradients outgrow their second moments, fall behind them, and one is 0
SCALES = (1.0, 1.0, 30.0, 0.1, 0.0, 3.0, 0.001, 100.0)
RATES = (0.01, 0.02, 0.02, 0.02, 0.02, 0.015, 0.01, 0.005)  # of each step
PEAK = max(RATES)
CONFIGS = (
    {"beta_1": 0.9, "beta_2": 0.98, "epsilon": 1e-6, "weight_decay": 0.0},
    {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-6, "weight_decay": 0.5},
    {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 0.5, "weight_decay": 0.5},
    {"beta_1": 0.9, "beta_2": 0.98, "epsilon": 1e-6, "weight_decay": 0.01, "decouple_lr": True},
)


def draw():
    """Initial values, and the gradients of each step; the embeddings of two tokens get none in most."""
    rng = np.random.default_rng(0)
    init = {name: np.round(rng.normal(size=shape), 3).tolist() for name, shape in SHAPES.items()}
    steps = []
    for number, scale in enumerate(SCALES):
        gradients = {name: np.round(rng.normal(size=shape), 3) * scale for name, shape in SHAPES.items()}
        gradients["encoder/embeddings"][3:] *= number == 5
        steps.append({name: np.round(values, 6).tolist() for name, values in gradients.items()})
    return init, steps


def take_steps(config, init, gradients):
    """Parameters after every step: list of dicts from name to nested lists."""
    parameters = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in init.items()}
    groups = [
        {
            "params": [parameter],
            "weight_decay": 0.0 if any(word in name for word in NOT_DECAYED) else config["weight_decay"],
        }
        for name, parameter in parameters.items()
    ]
    optimizer = StableAdamW(
        groups,
        lr=PEAK,
        betas=(config["beta_1"], config["beta_2"]),
        eps=config["epsilon"],
        decouple_lr=config.get("decouple_lr", False),
    )
    steps = []
    for rate, step in zip(RATES, gradients, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(step[name])
        optimizer.step()
        steps.append({name: parameter.tolist() for name, parameter in parameters.items()})
    return steps


def main():
    init, gradients = draw()
    runs = [{"config": config, "params": take_steps(config, init, gradients)} for config in CONFIGS]
    difference = 0.0
    if FILE.exists():
        for old, new in zip(json.loads(FILE.read_text())["runs"], runs, strict=True):
            for before, after in zip(old["params"], new["params"], strict=True):
                differences = [np.abs(np.subtract(before[name], after[name])).max() for name in SHAPES]
                difference = max(difference, *differences)
    golden = {"not_decayed": NOT_DECAYED, "init": init, "gradients": gradients, "rates": RATES, "runs": runs}
    FILE.write_text(json.dumps(golden) + "\n")
    print(f"largest difference {difference:g} over {len(runs)} runs")
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
