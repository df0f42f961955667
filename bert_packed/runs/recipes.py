"""Published recipes of unpacked pre-training, and what a data set's packing factor makes of them.

A step on packs sees p times the sequences of an unpacked step. The papers know two ways to make up for it:

    divide the batch    batch / p packs, and steps, warm-up and betas as they are ("Efficient Sequence Packing
                        without Cross-contamination", Section 4.3)
    raise the betas     as many packs as there were sequences, beta_1 and beta_2 to the power p (Sections 3.3
                        and 4.2); steps / p, to see as many sequences in all, and, which is ours, warm-up / p
"""

import dataclasses

from bert_packed.core.command_line import print_table
from bert_packed.core.settings import InputError
from bert_packed.schema import CAUSAL_LM

GRAPHCORE = "Graphcore's recipe, as PaddleNLP's examples/language_model/bert/static_ipu carries it"
NVIDIA = "NVIDIA DeepLearningExamples, PyTorch/LanguageModeling/BERT, scripts/configs/pretrain_config.sh"
LAMB_PAPER = "You et al. 2019, Large Batch Optimization for Deep Learning, Section 4.1"
DEVLIN = "Devlin et al. 2019, BERT, Section A.2 (google-research/bert's Adam does not correct its moments)"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of an unpacked run, under the names of their flags.

    Attributes:
        max_seq_length: Of its data, tokens.
        values: Dict from flag to value; `train_batch_size` counts sequences.
        sources: Dict from flag to where its value was published.
    """

    max_seq_length: int
    values: dict
    sources: dict


def _recipe(max_seq_length, source, others=(), **values):
    """A recipe whose values are all from one source, but for `others`, a dict from flag to theirs."""
    return Recipe(max_seq_length, values, {**dict.fromkeys(values, source), **dict(others)})


_LAMB = {"optimizer": "lamb", "weight_decay": 0.01, "beta_1": 0.9, "beta_2": 0.999}
_ADAM = {"optimizer": "adam", "weight_decay": 0.01, "beta_1": 0.9, "beta_2": 0.999}
_ROOT = {"decay_power": 0.5}  # the degree of NVIDIA's PolyWarmUpScheduler
_NVIDIA_BETAS = dict.fromkeys(("weight_decay", "beta_1", "beta_2"), LAMB_PAPER)

RECIPES = {
    "base-phase1": _recipe(
        128,
        GRAPHCORE,
        bert_config_file="bert-base",
        train_batch_size=65536,
        num_train_steps=7038,
        num_warmup_steps=2000,
        learning_rate=0.006,
        **_LAMB,
    ),
    "base-phase2": _recipe(
        384,
        GRAPHCORE,
        bert_config_file="bert-base",
        train_batch_size=16384,
        num_train_steps=2137,
        num_warmup_steps=274,
        learning_rate=0.002828427125,
        **_LAMB,
    ),
    "large-phase1": _recipe(
        128,
        NVIDIA,
        _NVIDIA_BETAS,
        bert_config_file="bert-large",
        train_batch_size=65536,
        num_train_steps=7038,
        num_warmup_steps=2001,  # a share of 0.2843
        learning_rate=0.006,
        **_ROOT,
        **_LAMB,
    ),
    "large-phase2": _recipe(
        512,
        NVIDIA,
        _NVIDIA_BETAS,
        bert_config_file="bert-large",
        train_batch_size=32768,
        num_train_steps=1563,
        num_warmup_steps=200,  # a share of 0.128
        learning_rate=0.004,
        **_ROOT,
        **_LAMB,
    ),
    **{
        f"devlin-{size}-{phase}": _recipe(
            length,
            DEVLIN,
            bert_config_file=f"bert-{size}",
            train_batch_size=256,
            num_train_steps=steps,
            num_warmup_steps=warmup,
            learning_rate=rate,
            end_learning_rate=end,
            **_ADAM,
        )
        # One linear decay over a million steps, 90 % of them at length 128 and the rest at 512
        for phase, length, steps, warmup, rate, end in (
            ("phase1", 128, 900_000, 10_000, 1e-4, 1e-5),
            ("phase2", 512, 100_000, 0, 1e-5, 0.0),
        )
        for size in ("base", "large")
    },
}


def divide_batch(values, packing_factor, multiple=1):
    """The first way.

    With p = 2 a batch of 16,384 sequences becomes one of 8,192 packs.

    Args:
        values: Of a `Recipe`.
        packing_factor: p, mean sequences per pack.
        multiple: The batch is one of this, as micro-batches ask.

    Returns:
        Dict from flag to value.
    """
    packs = max(1, round(values["train_batch_size"] / packing_factor / multiple)) * multiple
    return {**values, "train_batch_size": packs, "packing_correction": "none"}


def raise_betas(values, packing_factor):
    """The second way, arguments as of `divide_batch`.

    The flags of the betas stay as they are: `--packing_correction=betas` raises them.
    """
    fewer = {
        name: max(1, round(values[name] / packing_factor)) if values[name] else 0
        for name in ("num_train_steps", "num_warmup_steps")
    }
    return {**values, **fewer, "packing_correction": "betas"}


def read_recipe(name, packing_factor, config):
    """A recipe beside what packing makes of it and what a run does.

    Args:
        name: A key of `RECIPES`.
        packing_factor: Of the run's data; None where no manifest tells it.
        config: `TrainConfig` of the run.

    Returns:
        Dict for `run.json`: `name`, `max_seq_length`, `packing_factor`; `unpacked`, `divide_batch` and
        `raise_betas`, dicts from flag to value; `sources`, from flag to text.

    Raises:
        InputError: the run is no BERT's, or the packing factor is not known.
    """
    if config.objective == CAUSAL_LM:
        raise InputError(f"`recipe` must be empty for objective={CAUSAL_LM}. Received: {name}.")
    if packing_factor is None:
        raise InputError(
            "`recipe` must be empty where no manifest.json beside the records tells the packing factor. "
            f"Received: {name}."
        )
    recipe = RECIPES[name]
    return {
        "name": name,
        "max_seq_length": recipe.max_seq_length,
        "packing_factor": packing_factor,
        "unpacked": recipe.values,
        "divide_batch": divide_batch(recipe.values, packing_factor, config.micro_batch_size or 1),
        "raise_betas": raise_betas(recipe.values, packing_factor),
        "sources": recipe.sources,
    }


def recipe_rows(found, config, max_seq_length):
    """What `read_recipe` found, as a table: a row for each setting, list of dicts.

    Args:
        found: Of `read_recipe`.
        config: `TrainConfig` of the run.
        max_seq_length: S of its records, by which the packing factor goes.
    """
    ways = ("unpacked", "divide_batch", "raise_betas")
    length = dict.fromkeys(ways, found["max_seq_length"])
    rows = [{"setting": "max_seq_length", **length, "this run": max_seq_length}]
    for name in found["divide_batch"]:
        columns = {way: found[way].get(name, "") for way in ways}
        if name in ("beta_1", "beta_2"):
            columns["raise_betas"] = f"{found['unpacked'][name]}^{found['packing_factor']:.3g}"
        rows.append({"setting": name, **columns, "this run": getattr(config, name)})
    return rows


def print_recipe(found, config, max_seq_length):
    """Print that table and its sources; arguments as of `recipe_rows`."""
    print_table(recipe_rows(found, config, max_seq_length))
    print(f"recipe {found['name']}: {'; '.join(dict.fromkeys(found['sources'].values()))}")
