"""The settings of `pack_tfrecords.py`."""

import dataclasses

from bert_packed.assembly.feature_packs import parse_features
from bert_packed.core.settings import (
    InputError,
    advanced,
    check_depth_fits,
    check_settings,
    parse_depth,
    result_settings,
    setting,
    unmet_settings,
)
from bert_packed.packing.algorithms import ALGORITHM_NAMES, DEFAULT_ALGORITHM
from bert_packed.packing.histogram import MAX_LENGTH
from bert_packed.schema import CAUSAL_LM, MASKED_LM_WEIGHTS_KINDS, MLM_NSP, SEQUENCE
from data_gen.jobs.runners import LOCAL, MAX_WORKERS, NUM_WORKERS_HELP, RUNNER_HELP, RUNNERS

# Headings in `--help`
HEADINGS = RECORDS, PACKING, DRY_RUN, CALL = "Records", "Packing", "Dry run", "This call"
OVERLONG_CHOICES = ("error", "truncate", "drop")
LEFT_OUT = "be left out with {}, which cannot follow it"
NOT_FEATURES = {"features=": LEFT_OUT.format("--features")}
NOT_SPLIT = {"split_sequences=false": LEFT_OUT.format("--split_sequences")}
NOT_DRY_RUN = {"dry_run=false": LEFT_OUT.format("--dry_run")}
# Each of these settings is for one objective, which is that of the files
BERT_SETTINGS = ("max_predictions_per_pack", "masked_lm_weights")
CAUSAL_SETTINGS = ("split_sequences", "num_rows")


def _parse_features(text):
    if text:
        parse_features(text)
    return text


@dataclasses.dataclass(frozen=True)
class PackConfig:
    """Packs pre-training records, BERT's or those for causal language modeling: several sequences in one
    record of fixed length, next to no padding.

    Without --input_file it packs the embedded sample corpus. With it, OUTPUT_DIR receives
    packed-*.tfrecord and manifest.json. --json receives the table and, under `phases`, the seconds
    that each phase took. With --dry_run it says what packing would give: of your records, or of
    --histogram=FILE.
    """

    help_order = HEADINGS

    input_file: str = setting(
        "",
        "unpacked TFRecords in google-research/bert's format, or for causal language modeling: "
        "comma-separated paths or globs; empty = the embedded sample corpus",
        group=RECORDS,
    )
    output_dir: str = setting(
        "",
        "where the packs and manifest.json go; empty = sample_data/packed_LENGTH, for the sample corpus",
        changeable=True,
    )
    features: str = advanced(
        "",
        "features of records that are not BERT's, such as inputs:int:512,targets:int:114, which say how long "
        "packs are; see docs/guides/other_features.md; empty = BERT's",
        parse=_parse_features,
        only_with=NOT_SPLIT | NOT_DRY_RUN,
    )
    max_seq_length: int = setting(
        512,
        "tokens per pack",
        minimum=3,  # [CLS], a token, [SEP]
        maximum=MAX_LENGTH,
        only_with=NOT_FEATURES,
    )
    algorithm: str = setting(
        DEFAULT_ALGORITHM, "packing algorithm", choices=ALGORITHM_NAMES, only_with=NOT_SPLIT, group=PACKING
    )
    max_sequences_per_pack: int | str = setting(
        "max",
        "most sequences in a pack; 1 = unpacked, max = no limit",
        parse=parse_depth,
        only_with=NOT_SPLIT,
    )
    max_predictions_per_pack: int = setting(
        0,
        "masked-LM predictions a pack has room for; 0 = as many as the fullest pack needs",
        maximum=MAX_LENGTH,
        only_with=NOT_FEATURES | NOT_DRY_RUN,
    )
    overlong: str = setting(
        "error",
        "what to do with sequences over max_seq_length; counted in the manifest",
        choices=OVERLONG_CHOICES,
        only_with=NOT_SPLIT | NOT_DRY_RUN,
    )
    split_sequences: bool = setting(
        False,
        "lay sequences for causal language modeling end to end into rows, and cut these into packs: no "
        "padding, and state is carried from pack to pack; see docs/guides/mamba.md",
    )
    num_rows: int = setting(
        0, "with --split_sequences: rows, which is packs in a step of training", only_with="split_sequences"
    )
    num_shards: int = setting(
        8, "number of output files; fewer where there are fewer packs", minimum=1, group=RECORDS
    )
    random_seed: int = setting(12345, "seed of the assignment of sequences to packs", maximum=2**32 - 1)
    masked_lm_weights: str = advanced(
        SEQUENCE,
        "what masked_lm_weights hold: sequence, the prediction's sequence in the pack; binary, 1, for "
        "programs that weigh the loss by them (docs/guides/other_programs.md)",
        choices=MASKED_LM_WEIGHTS_KINDS,
    )
    provenance: bool = setting(
        False, "also write which input record each sequence of a pack comes from, one index a file"
    )
    num_workers: int = setting(0, NUM_WORKERS_HELP, maximum=MAX_WORKERS, changeable=True, group=CALL)
    runner: str = advanced(LOCAL, RUNNER_HELP, choices=RUNNERS, changeable=True)
    overwrite: bool = setting(
        False, "replace the data files of an output directory that is in use", transient=True
    )
    dry_run: bool = setting(
        False,
        "write no packs: print what lengths and depths would give, recommend one, and draw both as PNG into "
        "output_dir (default: packing_report)",
        only_with=NOT_SPLIT,
        transient=True,
        group=DRY_RUN,
    )
    histogram: str = setting(
        "",
        "with --dry_run, in place of input_file: JSON with `lengths` and `counts`, or the name of one that "
        "comes with the package, as wikipedia_512",
        only_with="dry_run",
        transient=True,
    )
    json: str = setting("", "also write the printed table to this file, as JSON", transient=True, group=CALL)

    def __post_init__(self):
        check_settings(self)
        if self.dry_run and bool(self.histogram) == bool(self.input_file):
            raise InputError("`dry_run` needs either `input_file` or `histogram`. Received: both or none.")
        if self.input_file and not self.output_dir and not self.dry_run:
            raise InputError("`output_dir` must be given with --input_file. Received: ''.")
        for name in ("split_sequences", "features"):
            if getattr(self, name) and not self.input_file:
                raise InputError(f"`input_file` must be given with --{name}. Received: ''.")
        if self.split_sequences and not self.num_rows:
            raise InputError("`num_rows` must be at least 1 with --split_sequences. Received: 0.")
        if not self.features:
            check_depth_fits(self.max_sequences_per_pack, self.max_seq_length)
            return
        self._refuse(self._changed(self._unused()), "--features of several capacities")
        for name, allowed in (("overlong", ("error", "drop")), ("masked_lm_weights", (SEQUENCE,))):
            if getattr(self, name) not in allowed:
                raise InputError(
                    f"`{name}` must be {' or '.join(allowed)} with --features. "
                    f"Received: {getattr(self, name)!r}."
                )
        # a sequence has at least one position of the first feature with a capacity
        first = next(spec for spec in parse_features(self.features) if spec.is_leader)
        check_depth_fits(self.max_sequences_per_pack, first.capacity, f"the capacity of {first.name}")

    def check_given(self, names):
        """Refuse flags without effect, even if they were given with their defaults."""
        # --dry_run may be added to any command, so flags without effect are no error then
        if self.features or self.split_sequences:
            check_settings(self, names)
            self._refuse(self._unused().intersection(names), "--features of several capacities")

    def check_objective(self, objective):
        """Refuse settings that cannot be honoured for records of an objective, one of `schema.OBJECTIVES`."""
        is_causal = objective == CAUSAL_LM
        names = BERT_SETTINGS if is_causal else CAUSAL_SETTINGS
        self._refuse(self._changed(names), f"records for {objective}")
        if is_causal and self.overlong == "truncate":
            raise InputError(
                f"`overlong` must be error or drop with records for {CAUSAL_LM}, which would lose the bytes "
                "of their labels; cut them with create_pretraining_data.py --max_seq_length. "
                f"Received: {self.overlong!r}."
            )

    def resolved(self, objective=MLM_NSP):
        """Dict of the settings that affect the result for records of an objective."""
        unused = {*unmet_settings(self), *self._unused()}
        if objective == CAUSAL_LM:
            unused.update(BERT_SETTINGS)
        if not self.split_sequences:
            unused.update(CAUSAL_SETTINGS)
        return {name: value for name, value in result_settings(self).items() if name not in unused}

    def _unused(self):
        # Features with several capacities have only one packing algorithm
        specs = parse_features(self.features) if self.features else ()
        return {"algorithm"} if sum(spec.is_leader for spec in specs) > 1 else set()

    def _changed(self, names):
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]

    def _refuse(self, names, what):
        for name in names:
            raise InputError(f"`{name}` must {LEFT_OUT.format(what)}. Received: {getattr(self, name)!r}.")
