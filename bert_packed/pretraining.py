"""How the parts of a pre-training run fit together: data, engine, and the hooks of the outer loop."""

import dataclasses
import functools
import itertools
from pathlib import Path

from bert_packed import checkpoint, input_pipeline, metrics_log, training
from bert_packed.engines.tensorflow import TensorFlowEngine
from bert_packed.losses import normalizers, pretraining_sums
from bert_packed.metrics import SUM_NAMES, means
from bert_packed.modeling import build_pretraining_model
from bert_packed.optimization import build_optimizer, build_schedule
from bert_packed.reports.packed_vs_unpacked import compare
from bert_packed.run_directory import describe_inputs
from data_gen import records
from data_gen.input_files import find_files
from data_gen.output import read_manifest
from data_gen.schema import PackSpec
from data_gen.settings import InputError

NUM_TIMED_STEPS = 5


@dataclasses.dataclass(frozen=True)
class PackedData:
    """What is known of a run's records before the first batch.

    Attributes:
        files, eval_files: Paths; no evaluation where the latter is empty.
        spec, eval_spec: Fixed shapes of each; the two may differ in K and P.
        inputs: Dict from flag name to descriptions of its files.
        packing_factor: Mean sequences per training pack, or None without a manifest.
        vocab_size: Of the data's vocabulary, or None where no manifest says.
    """

    files: list[str]
    eval_files: list[str]
    spec: PackSpec
    eval_spec: PackSpec | None
    inputs: dict[str, list[dict]]
    packing_factor: float | None
    vocab_size: int | None

    @property
    def num_packs(self):
        """Packs of all training files together."""
        return sum(entry["num_records"] for entry in self.inputs["input_file"])


def read_data(config):
    """Find a run's records and what they are.

    Args:
        config: `TrainConfig`.

    Raises:
        InputError: no file matches, a file is damaged or unpacked, files disagree, or the packing correction
            has no packing factor to use.
    """
    files = find_files(config.input_file, "input_file")
    spec = records.read_pack_spec(files)
    eval_files = find_files(config.eval_input_file, "eval_input_file") if config.eval_input_file else []
    manifests = [read_manifest(folder) for folder in {Path(path).parent for path in files}]
    known = all(manifest and manifest.get("num_packs") for manifest in manifests)
    factor = None
    if known:
        factor = sum(m["num_sequences"] for m in manifests) / sum(m["num_packs"] for m in manifests)
    elif config.packing_correction == "betas":
        raise InputError(
            "`packing_correction` must be none where no manifest.json beside the records tells the packing "
            "factor. Received: betas."
        )
    return PackedData(
        files=files,
        eval_files=eval_files,
        spec=spec,
        eval_spec=records.read_pack_spec(eval_files) if eval_files else None,
        inputs={"input_file": describe_inputs(files), "eval_input_file": describe_inputs(eval_files)},
        packing_factor=factor,
        vocab_size=max((m.get("vocab_size") or 0 for m in manifests if m), default=0) or None,
    )


def build_engine(config, model_config, data):
    """A compiled-step engine around a new model and optimizer, seeded by the config."""
    return TensorFlowEngine(
        build_pretraining_model(model_config, config.random_seed),
        functools.partial(pretraining_sums, mlm_loss=config.mlm_loss),
        SUM_NAMES,
        functools.partial(normalizers, mlm_loss=config.mlm_loss),
        build_optimizer(config, data.packing_factor or 1.0),
        config.packs_at_once,
    )


def make_hooks(config, model_config, data, engine, folder, first_step):
    """The hooks of the outer loop: where batches come from, and where figures and checkpoints go.

    Args:
        config, model_config, data, engine: Of the run.
        folder: Its output directory.
        first_step: Step of the checkpoint it continues from; later rows of the logs are removed.
    """
    log = metrics_log.MetricsLog(folder / "metrics.csv", metrics_log.TRAIN_COLUMNS, first_step)
    evaluate = None
    if data.eval_files:
        eval_log = metrics_log.MetricsLog(folder / "eval_metrics.csv", metrics_log.EVAL_COLUMNS, first_step)
        evaluate = functools.partial(_evaluate, config, model_config, data, engine, eval_log)

    schedule = build_schedule(config)

    def save(step, state):
        checkpoint.save_checkpoint(folder, step, engine, model_config, state, config.keep_checkpoint_max)

    return training.Hooks(
        batches=functools.partial(
            _train_batches, config, model_config, data.files, data.spec, data.num_packs
        ),
        log=log.write,
        evaluate=evaluate,
        save=save,
        learning_rate=lambda step: float(schedule(step)),
    )


def speed_rows(config, model_config, data, engine):
    """Packed against unpacked training speed, measured now; [] where no unpacked data are given.

    Trains on: call it after the last checkpoint.
    """
    if not config.unpacked_input_file:
        return []
    files = find_files(config.unpacked_input_file, "unpacked_input_file")
    spec = records.read_pack_spec(files)
    if spec.max_sequences_per_pack != 1 or spec.max_seq_length != data.spec.max_seq_length:
        raise InputError(
            "`unpacked_input_file` must hold packs of one sequence and the length of `input_file`. "
            f"Received: {spec}, {data.spec}."
        )
    unpacked = build_engine(config, model_config, data)
    num_unpacked = sum(records.count_records(path) for path in files)
    sources = {
        "unpacked": (unpacked, files, spec, num_unpacked),
        "packed": (engine, data.files, data.spec, data.num_packs),
    }
    steps = {}
    for name, (its_engine, *source) in sources.items():
        batches = itertools.islice(_train_batches(config, model_config, *source, 0), NUM_TIMED_STEPS)
        steps[name] = (its_engine.train_step, list(batches))
    return compare(steps, NUM_TIMED_STEPS)


def _train_batches(config, model_config, files, spec, num_packs, first_step):
    dataset = input_pipeline.train_batches(
        files,
        num_packs,
        spec,
        config.train_batch_size,
        config.random_seed,
        config.shuffle_buffer_size,
        first_step,
    )
    return input_pipeline.checked(dataset, files, spec, model_config)


def _evaluate(config, model_config, data, engine, log, step):
    dataset = input_pipeline.eval_batches(data.eval_files, data.eval_spec, config.eval_batch_size)
    batches = input_pipeline.checked(dataset, data.eval_files, data.eval_spec, model_config)
    sums = training.evaluate(engine, batches, config.max_eval_steps)
    log.write({"step": step, **means(sums, config.mlm_loss), "num_sequences": int(sums["num_sequences"])})
