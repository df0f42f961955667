"""The frozen config of a pre-training run, the rules across its groups, and what a run ends with."""

import dataclasses
import math

from bert_packed.architectures.registry import ablation_fields
from bert_packed.core.settings import InputError, check_divides, check_settings
from bert_packed.data.batches import BatchGrowth
from bert_packed.runs import pretraining_settings as groups
from bert_packed.runs.run_config import RunConfig
from bert_packed.schema import MLM
from bert_packed.text.masking import masking_rules


@dataclasses.dataclass(frozen=True)
class PretrainingConfig(
    # Flags have the order of these groups, from right to left
    groups.CallSettings,
    groups.LogSettings,
    groups.DeviceSettings,
    groups.OptimizerSettings,
    groups.StepSettings,
    groups.MaskingSettings,
    groups.ObjectiveSettings,
    groups.ModelSettings,
    groups.DataSettings,
    RunConfig,
):
    """Pre-trains a packed BERT on packed TFRecords: masked language model and next-sentence prediction.

    With --objective=mlm it trains the masked language model alone. With --objective=causal_lm it trains
    a packed Mamba on every next token.

    OUTPUT_DIR receives checkpoints, metrics.csv, eval_metrics.csv and TensorBoard events. The same
    command continues a stopped run. SIGTERM and Ctrl-C save at the next step and stop.
    --compile_only=FOLDER compiles the training step and reports on its program instead. Flagfiles of
    whole runs are in configs/; --flagfile=demo.flags takes under two minutes on two cores.
    """

    # The groups are base classes, so that a setting has one name as flag, argument and attribute. As nested
    # objects they would clash with flags: `optimizer`, `objective`, `masking`

    def __post_init__(self):
        super().__post_init__()
        if not self.output_dir and not self.compile_only:
            raise InputError("`output_dir` must be given. Received: nothing.")
        self._check_task()
        after_warmup = max(self.num_train_steps - self.num_warmup_steps, 0)
        if self.num_decay_steps > after_warmup:
            raise InputError(
                "`num_decay_steps` must be at most num_train_steps less num_warmup_steps, "
                f"{after_warmup}. Received: {self.num_decay_steps}."
            )
        if self.profile_steps and self.steps_to_profile[-1] > self.num_train_steps:
            raise InputError(
                f"`profile_steps` must be at most num_train_steps={self.num_train_steps}. Received: "
                f"{self.profile_steps}."
            )
        if self.objective == MLM and "ablation_no_next_sentence" in ablation_fields(self.ablation):
            raise InputError(
                f"`ablation` must leave next sentences alone for objective={MLM}, which has none. Received: "
                f"{self.ablation}."
            )
        self._check_batch_warmup()
        masking_rules(self)  # checks its shares
        self._check_layout()
        check_divides(self, "micro_batch_size", "train_batch_size")

    def _check_task(self):
        if self.do_train:
            return
        if not self.evaluates:
            raise InputError("`do_train` or `do_eval` must be true. Received: false for both.")
        for name in ("compile_only", "overwrite"):
            if getattr(self, name):
                raise InputError(
                    f"`do_train` must be true with {name}. Received: false, {name}={getattr(self, name)}."
                )

    def check_given(self, names):
        """Refuse what a default hides: num_train_steps beside num_train_epochs, do_eval=false."""
        check_settings(self, {"num_train_steps"}.intersection(names))
        if "do_eval" in names and not self.do_eval and not self.do_train:
            raise InputError("`do_train` or `do_eval` must be true. Received: false for both.")
        if "do_eval" in names and not self.do_eval and self.eval_input_file:
            raise InputError(
                f"`eval_input_file` must be empty with do_eval=false. Received: {self.eval_input_file}."
            )

    @property
    def evaluates(self):
        """True if packs are evaluated."""
        return self.do_eval or bool(self.eval_input_file)

    def with_eval_file(self):
        """The config whose `do_eval` and `eval_input_file` say what is evaluated, or that nothing is."""
        if not self.evaluates:
            return self
        packs = {}
        if not self.eval_input_file:
            max_eval_steps = self.max_eval_steps or groups.EVAL_BATCHES_OF_TRAINING
            packs = {"eval_input_file": self.input_file, "max_eval_steps": max_eval_steps}
        return dataclasses.replace(self, do_eval=True, **packs)

    def resolved(self, num_packs):
        """The config whose `num_train_steps` are those of `num_train_epochs` over a number of packs."""
        if not self.num_train_epochs:
            return self
        constant = BatchGrowth(self.train_batch_size, self.train_batch_size, self.packs_at_once)
        wanted = math.ceil(round(num_packs * self.num_train_epochs, 6))  # 0.07 * 100 is a bit over 7
        steps = (self.growth or constant).steps_for(wanted)
        return dataclasses.replace(self, num_train_steps=steps, num_train_epochs=0.0)

    def _check_batch_warmup(self):
        initial, steps = self.initial_batch_size, self.batch_warmup_steps
        if bool(initial) != bool(steps):
            raise InputError(
                "`initial_batch_size` and `batch_warmup_steps` must be given together. Received: "
                f"initial_batch_size={initial}, batch_warmup_steps={steps}."
            )
        if initial % self.packs_at_once or initial > self.train_batch_size:
            raise InputError(
                "`initial_batch_size` must be a multiple of micro_batch_size and at most train_batch_size. "
                f"Received: {initial}, micro_batch_size={self.packs_at_once}, "
                f"train_batch_size={self.train_batch_size}."
            )

    def _check_layout(self):
        if (self.layout == "none") != (not self.mesh):
            raise InputError(
                f"`mesh` must be given with a layout, and only then. Received: layout={self.layout}, "
                f"mesh={self.mesh or 'nothing'}."
            )
        if self.layout != "none" and self.distribution not in ("none", "multi_worker"):
            raise InputError(
                "`distribution` must be none, or multi_worker for devices of several processes, with a "
                "layout; the mesh says how many copies of the model share a step. Received: "
                f"{self.distribution}."
            )

    @property
    def mesh_shape(self):
        """(copies of the model, rows, columns) of the mesh; None without a layout."""
        if not self.mesh:
            return None
        sides = tuple(map(int, self.mesh.split(",")))
        return sides if len(sides) == 3 else (1, *sides)

    @property
    def steps_to_profile(self):
        """Range of the steps that are traced; empty for none."""
        if not self.profile_steps:
            return range(0)
        first, last = map(int, self.profile_steps.split(","))
        return range(first, last + 1)

    @property
    def growth(self):
        """`BatchGrowth` of the steps; None where all are alike."""
        if not self.batch_warmup_steps:
            return None
        return BatchGrowth(
            self.initial_batch_size, self.train_batch_size, self.packs_at_once, self.batch_warmup_steps
        )

    @property
    def packs_at_once(self):
        """Packs in one micro-batch."""
        return self.micro_batch_size or self.train_batch_size


@dataclasses.dataclass(frozen=True)
class PretrainingResult:
    """Result of a call of `pretrain`."""

    output_dir: str
    metrics: list[dict]  # the last figures, a row for training and one for the held-out data; [] if stopped
    speed: list[dict]  # packed beside unpacked training, with `unpacked_input_file`; else []
    stopped_by: int = 0  # the signal after which the run saved and stopped; 0 = it is complete
    not_compared: str = ""  # why the two speeds could not be compared
