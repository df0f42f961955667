"""How steps run on Apache Beam: an element each, their results in a folder that all machines share."""

import os
import shlex

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from data_gen import files
from data_gen.settings import InputError

OPTIONS_VARIABLE = "BEAM_OPTIONS"


def run_pipeline(runner, function, elements, work_folder):
    """Apply a function to every element, on any machine.

    Args:
        runner: Name of a Beam runner. Its own options are in the environment variable `BEAM_OPTIONS`, as
            `--flink_master=host:8081 --parallelism=64`.
        function: Function of a module.
        elements: List of what can be pickled.
        work_folder: Folder that all machines see.

    Raises:
        InputError, OSError: what the function raised first, in the order of the elements.
    """
    options = PipelineOptions(shlex.split(os.environ.get(OPTIONS_VARIABLE, "")), runner=runner)
    folder = os.path.join(work_folder, "errors")
    files.remove_folder(folder)
    files.make_folder(folder)
    numbered = [(function, folder, number, element) for number, element in enumerate(elements)]
    with beam.Pipeline(options=options) as pipeline:
        # without the reshuffle Beam would fuse everything into the one step that makes the list
        _ = pipeline | beam.Create(numbered) | beam.Reshuffle() | beam.Map(_apply)
    for name in files.list_names(folder):
        kind, message = files.read_text(os.path.join(folder, name)).split("\n", 1)
        raise {"input": InputError, "system": OSError}[kind](message)


def _apply(numbered):
    """Call the function; a user's mistake is kept for the parent, which Beam would bury in a traceback."""
    function, folder, number, element = numbered
    try:
        function(element)
    except (InputError, OSError) as error:
        kind = "input" if isinstance(error, InputError) else "system"
        files.write_text(os.path.join(folder, f"{number:09d}"), f"{kind}\n{error}")
