"""The flagfiles of published recipes: their values, and batches divided by Wikipedia's packing factor."""

from pathlib import Path

import pytest

from bert_packed.core.command_line import parse
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.training.optimization import build_schedule

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FACTORS = {128: 1.17, 512: 2.0}  # "Efficient Sequence Packing", Tables 2 and 1
LAMB = {"optimizer": "lamb", "weight_decay": 0.01, "beta_1": 0.9, "beta_2": 0.999}
ADAM = {**LAMB, "optimizer": "adam"}
# A recipe has length; sequences of a step, steps, warm-up, peak and last rate, power of the decay
PUBLISHED = {
    "phase1": (128, 65536, 7038, 2000, 0.006, 0, 1, "bert-base", LAMB),
    "phase2": (512, 16384, 2137, 274, 0.002828427125, 0, 1, "bert-base", LAMB),
    "large-phase1": (128, 65536, 7038, round(0.2843 * 7038), 0.006, 0, 0.5, "bert-large", LAMB),
    "large-phase2": (512, 32768, 1563, round(0.128 * 1563), 0.004, 0, 0.5, "bert-large", LAMB),
    **{
        f"devlin-{size}-{phase}": (length, 256, steps, warmup, peak, last, 1, f"bert-{size}", ADAM)
        for phase, length, steps, warmup, peak, last in (
            ("phase1", 128, 900_000, 10_000, 1e-4, 1e-5),  # one line over both phases
            ("phase2", 512, 100_000, 0, 1e-5, 0),
        )
        for size in ("base", "large")
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_as_published_but_for_its_batch(name):
    length, sequences, steps, warmup, peak, last, power, model, optimizer = PUBLISHED[name]
    config = parse(PretrainingConfig, ["x", f"--flagfile={CONFIGS / name}.flags"])
    assert config.train_batch_size * FACTORS[length] == pytest.approx(sequences, rel=0.02)
    assert f"packed_{length}/" in config.input_file and config.bert_config_file == model
    assert (config.num_train_steps, config.num_warmup_steps) == (steps, warmup)
    assert (config.learning_rate, config.end_learning_rate, config.decay_power) == (peak, last, power)
    assert {key: getattr(config, key) for key in optimizer} == optimizer
    assert (config.packing_correction, config.mlm_loss) == ("none", "per_sequence")


MODERN = {"modernbert-base", "modernbert-base-long"}


def test_modernberts_phases_are_those_of_the_paper():
    """Warner et al. 2024: 1,719 billion tokens, then 250 and 50 billion of longer sequences."""
    short, long = (
        parse(PretrainingConfig, ["x", f"--flagfile={CONFIGS / name}.flags"]) for name in sorted(MODERN)
    )
    steps = (short.num_warmup_steps, short.batch_warmup_steps, short.num_train_steps)
    tokens = [short.growth.packs_before(each) * 1024 for each in steps]
    assert tokens == pytest.approx([3e9, 50e9, 1719e9], rel=1e-4)
    steps = (long.num_train_steps - long.num_decay_steps, long.num_decay_steps)
    assert [n * long.train_batch_size * 8192 for n in steps] == pytest.approx([250e9, 50e9], rel=1e-4)
    for config, length, theta in ((short, 1024, 1e4), (long, 8192, 1.6e5)):
        assert (config.max_position_embeddings, config.global_rope_theta) == (length, theta)
        assert config.weight_decay * config.learning_rate == pytest.approx(1e-5, rel=1e-5)
        assert (config.optimizer, config.beta_1, config.beta_2) == ("stable_adamw", 0.9, 0.98)
        assert (config.max_grad_norm, config.mlm_loss) == (0, "per_token")
    # The rate is constant until the last cool-down, which is that of composer's OneMinusSqrtScheduler
    rate = build_schedule(short)
    assert float(rate(1907)) == pytest.approx(4e-4, rel=1e-3)
    assert [float(rate(step)) for step in (4000, 374_900)] == pytest.approx([8e-4] * 2, rel=1e-6)
    rate, end = build_schedule(long), long.num_train_steps
    for step in (0, end - long.num_decay_steps):
        assert float(rate(step)) == pytest.approx(3e-4, rel=1e-6)
    for share in (0.25, 0.5, 1.0):
        step = end - round(long.num_decay_steps * (1 - share))
        assert float(rate(step)) == pytest.approx(3e-4 * (0.001 + 0.999 * (1 - share**0.5)), rel=1e-3)


def test_every_flagfile_of_configs_has_a_test_of_its_values():
    others = {"demo", "mamba", "squad", *MODERN}  # run by other tests, and above
    assert {path.stem for path in CONFIGS.glob("*.flags")} == PUBLISHED.keys() | others
