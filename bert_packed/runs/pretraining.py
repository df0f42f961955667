"""One pre-training run, built station by station: config, data, run directory, engine, training."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import sys
from pathlib import Path

import keras

from bert_packed.architectures.base_config import BaseConfig
from bert_packed.architectures.packed_model import check_options
from bert_packed.architectures.registry import AUTO, OBJECTIVE_HEADS
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.core.command_line import print_table
from bert_packed.core.hub import with_local_start
from bert_packed.core.settings import InputError
from bert_packed.core.storage import write_json
from bert_packed.data.batches import ReadAhead
from bert_packed.kernels.choose import choose_kernels
from bert_packed.objectives.pretraining import choose_objective
from bert_packed.parallel.processes import ALONE, Alone
from bert_packed.parallel.replicas import check_shares, make_replicas
from bert_packed.parallel.targets import Target, devices_here
from bert_packed.runs import pretraining_data, run_directory, run_summary, vocabulary
from bert_packed.runs.exports import export_step
from bert_packed.runs.interleaved_timing import Contender, compare
from bert_packed.runs.pretraining_config import PretrainingConfig, PretrainingResult
from bert_packed.training import loop, metrics_log
from bert_packed.training.backend import TRAINING_COPIES, Profile, check_memory, out_of_memory_names
from bert_packed.training.engines import make_engine
from bert_packed.training.optimization import build_optimizer, build_schedule

NUM_TIMED_STEPS = 5
DTYPES_OF_PRODUCTS = {"float32": "float32", "mixed_bfloat16": "bfloat16"}


@dataclasses.dataclass
class Run:
    """A run and what its stations have made so far, in the order of the attributes.

    A station reads what those before it have made. All raise `InputError` for a user's mistake. Nothing of an
    earlier run is removed before the end of `start_engine`.

    Attributes:
        target: Devices that steps are compiled for.
        folder: Output directory, locked.
        latest: The checkpoint that the run continues from; None for a start.
        state: The `state.json` of `latest`; None for a start.
        logs: The log of training and, with held-out data, of evaluations.
    """

    config: PretrainingConfig
    processes: Alone = ALONE
    target: Target = dataclasses.field(default_factory=devices_here)
    data: pretraining_data.PackedData | None = None
    model_config: BaseConfig | None = None
    folder: Path | None = None
    latest: Path | None = None
    engine: object = None
    state: dict | None = None
    logs: list = dataclasses.field(default_factory=list)

    @functools.cached_property
    def objective(self):
        """The `Objective`; `InputError` where the model's family lacks its head."""
        config = self.config
        objective = choose_objective(config.objective, self.model_config, config, self.data.train.num_rows)
        if config.batch_warmup_steps:
            # A step that has not grown yet fills its batch with empty packs, which must cost no time
            objective = dataclasses.replace(objective, skips_empty=True)
        return objective

    @functools.cached_property
    def kernels(self):
        """The kernels of the target; `InputError` where it lacks those that are asked for."""
        length = self.data.train.spec.max_seq_length
        return choose_kernels(self.config.attention, self.model_config, length, self.target.platform)

    @property
    def first_step(self):
        """Number of steps taken before."""
        return self.state["step"] if self.state else 0

    def settle_config(self):
        """Station 1: what is evaluated, and `dtype` and `micro_batch_size` as the run began.

        Checked here: that `output_dir` is a folder of this machine, and its `run.json`; that
        `init_checkpoint` is there, or on the hub. Its settings were checked when the config was made.
        """
        config = run_directory.as_begun(self.config.with_eval_file(), self.processes)
        begun = run_directory.begun_flags(config)
        self.config = with_local_start(config, begun, may_be_gone=True)

    def read_data(self):
        """Station 2: the records, the model's config and the number of steps.

        Checked here: that `output_dir` is empty or a run's; files, shapes, manifests, vocabularies and every
        byte of the records; that they fit model and objective; the vocabulary of exports.
        """
        self.data = pretraining_data.read_data(self.config, self.processes)
        self.config = self.config.resolved(self.data.num_packs)
        self.fit_model()
        vocabulary.check_export(self.config, self.model_config, self.data)

    def fit_model(self):
        """Make the model's config by flags and vocabulary, and check that the records fit it."""
        self.model_config = pretraining_data.model_config_of(self.config, self.data)
        pretraining_data.check_fits(self.data, self.model_config, self.config)

    @contextlib.contextmanager
    def open_directory(self):
        """Station 3: hold the lock of the output directory, and decide whether the run starts or continues.

        Checked here: that no other run holds the directory, and all processes share it and were given the
        same; that a run continues as it was, from a whole checkpoint. For a start, what `init_checkpoint`
        says of its model and vocabulary, and that every held-out record can be read.
        """
        config, start = self.config, self.config.init_checkpoint
        facts = self._facts()
        with run_directory.locked(config.output_dir, self.processes) as self.folder:
            self.latest = run_directory.agree(self.folder, config, facts, print, self.processes)
            if not self.latest:
                if start:
                    run_directory.check_outside(start, self.folder)
                    starting_weights.check(start, self.model_config, OBJECTIVE_HEADS[config.objective])
                vocabulary.check_start(start, self.model_config, self.data.vocabulary)
                # A mistake in them would otherwise show after training
                for _ in itertools.islice(pretraining_data.eval_batches(self), config.max_eval_steps or None):
                    continue
            yield

    def start_engine(self):
        """Station 4: the compiled step, with the weights and the state that the run goes on from.

        Checked here: that the devices can share the packs and hold the model, and the tensors of the
        checkpoint. Only then is an earlier run removed, and a new one recorded.
        """
        config, processes, data = self.config, self.processes, self.data
        processes.say(run_summary.describe_run(config, self.model_config, data, self.kernels.description))
        steps_before = 0
        if config.keep_optimizer_state:
            # The optimizer needs the number when it is built: its schedule begins at that step
            steps_before = checkpoint.steps_before(self.latest, config.init_checkpoint)
        self.engine = self.build_engine(steps_before)
        if config.layout != "none":
            processes.say(self.engine.replicas.layout.describe(self.model_config))
        if self.latest:
            self.state = checkpoint.restore_checkpoint(self.latest, self.engine)
            processes.say(run_directory.describe_continuation(self.folder, self.latest))
        else:
            if config.init_checkpoint:
                self.load_weights(config.init_checkpoint)
            if config.keep_optimizer_state:
                checkpoint.load_moments(config.init_checkpoint, self.engine)
                processes.say(f"  its optimizer's moments, of {steps_before:,} steps, are kept")
            processes.first_decides(lambda: run_directory.start_run(self.folder, config, self._facts()))
        if processes.is_first:
            run_directory.remove_partial(self.folder)
            vocabulary.keep_copy(self.folder, data.vocabulary)

    def train(self):
        """Station 5: train to the last step, report, and compare speeds; returns a `PretrainingResult`.

        Checked here: that no row of a log is lost, and that losses, gradients and weights are finite.
        """
        config, processes = self.config, self.processes
        is_complete = self.first_step == config.num_train_steps
        rate = None
        if processes.is_first and not is_complete:
            rate = run_summary.measured_flops_per_second(dtype=DTYPES_OF_PRODUCTS[config.dtype])
        scale = self.scale(rate)
        if rate and not self.latest:
            processes.say(
                run_summary.describe_cost(config, self.model_config, scale.model_flops, self.data, rate)
            )
        hooks = self.hooks(scale)
        if is_complete:
            processes.say(f"the run is complete: {self.latest} holds all {self.first_step:,} steps")
        elif processes.is_first:
            backend = keras.backend.backend()
            run_directory.record_segment(self.folder, self.first_step, backend, peak_flops=scale.peak_flops)
        with run_directory.naming_last_checkpoint(self.folder):
            stopped_by = loop.train(self.engine, config, hooks, self.first_step, self.state)
        if stopped_by:
            if processes.is_first:
                print("stopped after saving; the same command continues", file=sys.stderr)
            return PretrainingResult(config.output_dir, [], [], stopped_by)
        metrics = []
        if processes.is_first:
            metrics = metrics_log.last_figures(self.folder, self.objective.figures)
            if self.engine.num_train_traces:
                print(f"compiled   {self.engine.num_train_traces} training program")
            self.report(metrics)
        # The report comes first: whatever befalls the comparison, the run's figures are out
        speed, not_compared = [], ""
        try:
            with out_of_memory_names("the comparison of speeds", "micro_batch_size"):
                speed = self.compare_speeds()
        except (InputError, OSError, MemoryError) as error:
            not_compared = " ".join(str(error).split())
        if speed and processes.is_first:
            print()
            print_table(speed)
            self._write_json(metrics, speed)
        return PretrainingResult(config.output_dir, metrics, speed, not_compared=not_compared)

    def build_engine(self, steps_before=0):
        """A compiled-step engine around a new model and optimizer, seeded by the config.

        `steps_before` is as in `build_optimizer`. Raises `InputError` where the devices cannot share the
        packs, and `MemoryError` where they cannot hold the model.
        """
        config, target = self.config, self.target
        replicas = self._choose_replicas()
        scope = replicas.scope if replicas else contextlib.nullcontext
        with scope():
            optimizer = build_optimizer(config, self.data.train.packing_factor or 1.0, steps_before)
        # JAX allocates no weight for absent devices; TensorFlow traces variables that have values
        is_abstract = target.devices and keras.backend.backend() == "jax"
        if not is_abstract and config.layout == "none":  # each device holds the whole model
            check_memory(self.model_config, TRAINING_COPIES)
        values = contextlib.nullcontext()
        if is_abstract:
            values = keras.StatelessScope(initialize_variables=False)
        with scope(), values:
            model = self.objective.build_model(
                self.model_config,
                config.random_seed,
                dtype=target.dtype if config.dtype == AUTO else config.dtype,
                remat=config.remat,
                num_rows=self.data.train.num_rows or None,
                layout=(replicas and replicas.layout) or None,
                **self.kernels.options,
            )
            return make_engine(model, self.objective, optimizer, config.packs_at_once, replicas, target)

    def load_weights(self, source):
        """Load weights of a checkpoint, of any form, and say which: `starting_weights.Loaded`."""
        engine = self.engine
        found = starting_weights.load(source, engine.weights(), self.model_config, engine.model.head)
        self.processes.say("\n".join(found.lines()))
        return found

    def scale(self, flops_per_second):
        """Reference quantities of a step's logged rates: `metrics_log.Scale`.

        `flops_per_second` is of one device, measured; None for no figure.
        """
        num_devices = self.engine.replicas.num_whole if self.engine.replicas else 1
        return metrics_log.Scale(
            positions_per_step=self.config.train_batch_size * self.data.train.spec.max_seq_length,
            model_flops=functools.partial(self.engine.objective.model_flops, self.model_config),
            peak_flops=flops_per_second and flops_per_second * num_devices,
        )

    def hooks(self, scale):
        """The hooks of the outer loop; raises `InputError`, before a log changes, where its rows are lost."""
        config, folder, is_first = self.config, self.folder, self.processes.is_first
        evaluation_due = bool(self.state and self.state["evaluation_due"])
        self.logs = metrics_log.open_logs(
            folder, config, self.engine.objective, self.first_step, evaluation_due, self.processes
        )
        log, *eval_log = self.logs
        schedule = build_schedule(config)

        def note_skipped(step, why, sources):
            # Each process knows where its own packs are from
            run_summary.tell_skipped(step, why, sources)
            run_directory.record_skipped(folder, self.processes.index, step, why, sources)

        def prune():
            if is_first:
                checkpoint.prune_checkpoints(folder, config.keep_checkpoint_max)

        return loop.Hooks(
            batches=functools.partial(pretraining_data.train_batches, self),
            log=log.write,
            show=run_summary.show_line if is_first else lambda _: None,
            evaluate=(lambda step: eval_log[0].write(self.evaluate(step))) if eval_log else None,
            save=self.save,
            export=self.export if config.export_every else None,
            prune=prune,
            learning_rate=lambda step: float(schedule(step)),
            means=self.engine.objective.means,
            tell_skipped=note_skipped,
            shows_progress=is_first,
            num_processes=self.processes.num,
            scale=scale,
            profile=Profile(folder / run_directory.EVENTS_FOLDER / "profile", config.steps_to_profile),
        )

    def save(self, step, state):
        """Write a checkpoint, after the rows that a run which continues from it needs."""
        for log in self.logs:
            log.flush_to_disk()
        self._first_writes(
            lambda held: checkpoint.save_checkpoint(self.folder, step, held, self.model_config, state)
        )

    def export(self, step):
        """Write the model of a step in the form of Hugging Face."""
        of_run = self.config, self.data
        self._first_writes(
            lambda held: export_step(self.folder, step, self.engine.model, held.weights(), *of_run)
        )

    def _first_writes(self, write):
        # Every process does this: they fetch parts of the weights from each other's devices
        held = self.engine.to_save(keeps=self.processes.is_first)
        # The result is a string, since it travels to the other processes as JSON
        self.processes.first_decides(lambda: str(write(held)))

    def evaluate(self, step):
        """Evaluate the held-out packs; returns the row of a step: dict."""
        with contextlib.closing(ReadAhead(pretraining_data.eval_batches(self))) as batches:
            sums = loop.evaluate(self.engine, batches, self.config.max_eval_steps)
        means = self.engine.objective.means(sums)
        return {"step": step, **means, "num_sequences": int(sums["num_sequences"])}

    def report(self, metrics):
        """Print the last figures, and write them to `--json` and those of held-out packs beside the run."""
        print_table(metrics)
        sys.stdout.flush()
        for row in metrics:
            if row["data"] == "eval":
                scores = {name: value for name, value in row.items() if name != "data"}
                write_json(self.folder / run_directory.SCORES_FILE, scores)
        self._write_json(metrics, [])

    def compare_speeds(self):
        """Rows that compare packed and unpacked training speed, measured now; [] without unpacked data.

        The engine takes training steps: call this after the last checkpoint.
        """
        packed, unpacked = self.data.train, self.data.unpacked
        if not unpacked.files:
            return []
        # Steps are full, as all are after the batch has grown
        config = dataclasses.replace(self.config, initial_batch_size=0, batch_warmup_steps=0)
        full = dataclasses.replace(self, config=config)
        contenders = []
        for name, engine, packs, factor in (
            # A new engine's weights do: it only gives the time of a step, which does not depend on them
            ("unpacked", self.build_engine(), unpacked, 1.0),
            ("packed", self.engine, packed, packed.packing_factor),
        ):
            with contextlib.closing(pretraining_data.train_batches(full, packs=packs)) as ahead:
                batches = list(itertools.islice(ahead, NUM_TIMED_STEPS))
            # The factor is of all data: these few packs may hold more or fewer sequences
            per_step = factor * config.train_batch_size
            contenders.append(Contender(name, engine.train_step, batches, per_step, factor))
        return compare(contenders, NUM_TIMED_STEPS)

    def _facts(self):
        """Facts that the result depends on besides flags, as `run.json` keeps them."""
        facts = {"model": dataclasses.asdict(self.model_config), **self.data.facts}
        if self.config.balanced_devices > 1:  # by other plans processes would divide steps in another way
            plans = json.dumps([(m["plan"], m["settings"]["random_seed"]) for m in self.data.train.manifests])
            facts["data"]["plans"] = hashlib.sha256(plans.encode()).hexdigest()
        return facts

    def _write_json(self, metrics, speed):
        if self.config.json:
            write_json(self.config.json, {"metrics": metrics, "speed": speed})

    def _choose_replicas(self):
        """The devices that the run is spread over; raises `InputError` where they cannot share its packs."""
        config = self.config
        packs = {"micro_batch_size": config.packs_at_once}
        if self.data.eval.files:
            packs["eval_batch_size"] = config.eval_batch_size
        if config.layout == "none":
            # This is data parallelism alone: every device holds the whole model
            replicas = make_replicas(config.distribution, self.processes.strategy, self.target)
            check_shares(replicas, **packs)
            return replicas
        if keras.backend.backend() != "jax":
            raise InputError(
                f"`layout` must be none unless KERAS_BACKEND=jax. Received: {config.layout}, under "
                f"{keras.backend.backend()}."
            )
        check_options(self.model_config, layout=config.layout)
        from bert_packed.parallel.layouts import make_layout_replicas  # JAX, which need not be installed

        replicas = make_layout_replicas(
            config.layout, config.mesh_shape, distribution=config.distribution, target=self.target
        )
        replicas.layout.check(self.model_config, **packs)
        return replicas
