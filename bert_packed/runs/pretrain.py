"""Pre-training as a function: from a config to a trained model in its output directory."""

from bert_packed.core.settings import InputError
from bert_packed.parallel import cluster
from bert_packed.training.engines import choose_backend


def pretrain(config, prepare=None):
    """Pre-train a model as a `PretrainingConfig` describes, or continue its run; prints as it goes.

        result = bert_packed.pretrain(PretrainingConfig(input_file="packed/*.tfrecord", output_dir="run"))

    SIGTERM and Ctrl-C save at the next step and stop. In the first step, which compiles, SIGTERM ends the
    process at once, unless there are several. In a cluster every process calls this.

    Args:
        config: `PretrainingConfig`; `compile_only` must be empty.
        prepare: Function that makes missing records; called by the first process, before any looks for them.

    Returns:
        `PretrainingResult`. Its metrics are those of the first process, [] in the others.

    Raises:
        InputError: settings, records or an earlier run in the output directory cannot be used, with the words
            of `run_pretraining.py`. It is a `ValueError`.
        OSError: a file cannot be read or written.
        MemoryError: the devices have too little memory.
    """
    if config.compile_only:
        raise InputError(f"`compile_only` must be empty to train. Received: {config.compile_only}.")
    if config.sample_data and not prepare:
        raise InputError("`sample_data` must be false without the command that makes it. Received: True.")
    with cluster.start(config.distribution, choose_backend()) as processes:
        if prepare:
            processes.first_decides(lambda: prepare() and None)
        # This imports TensorFlow, which must wait until the backend is chosen
        from bert_packed.runs.evaluate_only import Evaluation
        from bert_packed.runs.pretraining import Run

        run = (Run if config.do_train else Evaluation)(config, processes)
        run.settle_config()
        run.read_data()
        with run.open_directory():
            run.start_engine()
            return run.train()
