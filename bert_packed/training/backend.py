"""Compiled functions, gradients, devices, out-of-memory errors and profiler traces under either backend."""

import contextlib
import functools
import os

import keras

from bert_packed.architectures.base_config import BaseConfig
from bert_packed.parallel.targets import accelerator_of, devices_here

TRAINING_COPIES = 3  # of the weights: they and the moments of an optimizer, of which each has two


@contextlib.contextmanager
def products_in(dtype, platform):
    """Context manager: matrix products traced inside are computed in a dtype, also where it is "float32".

    By default a TPU multiplies float32 in one pass of bfloat16, and a GPU by TF32.
    """
    is_exact = dtype == "float32"
    if platform == "cpu":
        yield
    elif keras.backend.backend() == "jax":
        import jax

        with jax.default_matmul_precision("highest" if is_exact else "default"):
            yield
    else:
        import tensorflow as tf

        # The setting holds for the process, and for good: it is read when the traced program is compiled
        tf.config.experimental.enable_tensor_float_32_execution(not is_exact)
        yield


def compiled(function, model=None):
    """Compile a function of arrays, or of dicts of them, by XLA: once for each set of input shapes.

    The function may read variables of `model` and of no other; what it assigns is lost under JAX. Products of
    arrays in float32 are in float32, unless the model is of mixed precision.
    """

    def traced(*inputs):
        with products_in(model.compute_dtype if model is not None else "float32", devices_here().platform):
            return function(*inputs)

    if keras.backend.backend() == "jax":
        return _compiled_by_jax(traced, model)
    import tensorflow as tf

    # Each function and shape is meant to have its own program. Of equal filters the logger keeps one
    tf.get_logger().addFilter(_is_told)
    return tf.function(traced, jit_compile=True, reduce_retracing=False, autograph=False)


def _is_told(record):
    """False for TensorFlow's warning that functions made one after another are each traced."""
    return "triggered tf.function retracing" not in record.getMessage()


def _compiled_by_jax(function, model):
    import jax

    # Variables are arguments of the program: JAX would fold those that it closes over as constants, and never
    # read them again
    variables = model.variables if model is not None else []

    # Training steps have the same options, without which a GPU compiles for minutes
    @functools.partial(jax.jit, compiler_options=devices_here().compiler_options)
    def program(values, *inputs):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return function(*inputs)

    # After steps that devices share, each has the value: one of them computes, and the kernels are for one
    return lambda *inputs: program([variable.value.addressable_data(0) for variable in variables], *inputs)


def gradient(function):
    """The gradient of a scalar `function(inputs)` with respect to its inputs, as a function."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.grad(function)
    import tensorflow as tf

    def differentiated(inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            result = function(inputs)
        return tape.gradient(result, inputs, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    return differentiated


@contextlib.contextmanager
def out_of_memory_names(where, setting):
    """Raise `MemoryError` where the backend runs out of device memory; the body must wait for its results.

    Args:
        where: The computation, for the message: "a training step".
        setting: Flag to lower, for the message.
    """
    try:
        yield
    except Exception as error:  # the backends share no class of it; all others are raised again
        if not _is_out_of_memory(error):
            raise
        raise MemoryError(f"out of memory in {where}; lower `{setting}`") from error


def _is_out_of_memory(error):
    if keras.backend.backend() == "jax":
        import jax

        return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    import tensorflow as tf

    return isinstance(error, tf.errors.ResourceExhaustedError)


def device_memory_bytes():
    """Memory of the device that steps run on, of a CPU that of the machine; None where it is not told.

    The limit of a container is not seen.
    """
    if devices_here().platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if keras.backend.backend() == "jax":
        import jax

        # JAX raises an error for a device of another process, which the first of all may be
        return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    import tensorflow as tf

    kinds = [
        tf.config.experimental.get_device_details(device).get("device_name")
        for device in tf.config.list_physical_devices("GPU")
    ]
    known = accelerator_of(kinds[0]) if kinds else None
    return known and known.memory_bytes


def check_memory(model_config, num_copies=1):
    """Raise `MemoryError` where a model does not fit a device, before any of its weights is made.

    The backend would fail in the middle, or the system kill the process. `num_copies` of the weights must be
    held at once; activations are not counted.
    """
    needed, memory_bytes = num_copies * model_config.weight_bytes, device_memory_bytes()
    if memory_bytes is not None and needed > memory_bytes:
        shape = {name: getattr(model_config, name) for name in BaseConfig.shape_fields}
        raise MemoryError(
            f"the model must fit a device's memory of {memory_bytes:,} bytes. Received: "
            f"{', '.join(f'{name}={value}' for name, value in shape.items())}, which need at least "
            f"{needed:,} bytes for {'weights' if num_copies == 1 else 'weights and moments'}."
        )


def make_virtual_devices(number):
    """Make `number` CPU devices, and no others, visible to the backend, in order to compile for them.

    There may be more than the machine has cores. Raises `RuntimeError` where the backend has already
    initialised its devices in this process.
    """
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", number)
        return
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)


class Profile(contextlib.ExitStack):
    """Context manager that traces the steps of a range; leaving it early writes the trace so far.

        with Profile("run/tensorboard/profile", range(10, 21)) as profile:
            for step in ...:
                with profile.step(step):
                    ...

    Args:
        folder: Folder that receives the trace, as `plugins/profile/TIME/HOST.xplane.pb`.
        steps: Range of steps; empty for none.
    """

    def __init__(self, folder="", steps=range(0)):
        super().__init__()
        self._folder = str(folder)
        self._steps = steps
        self._has_begun = False

    @contextlib.contextmanager
    def step(self, number):
        """Trace the body if `number` is one of the steps."""
        if number not in self._steps:
            yield
            return
        trace, mark = _profiler()
        if not self._has_begun:
            self._has_begun = True
            self.enter_context(trace(self._folder))
        with mark(step_num=number):
            yield
        if self.ends_with(number):
            self.close()

    def ends_with(self, number):
        """True of the last step to trace: its body must wait for what it has started."""
        return number in self._steps and number == self._steps[-1]


def _profiler():
    """The backend's context managers that trace into a folder, and that mark the body of a step."""
    if keras.backend.backend() == "jax":
        from jax import profiler

        return profiler.trace, functools.partial(profiler.StepTraceAnnotation, "train")
    from tensorflow.profiler import experimental as profiler

    # `_r=1`, as in TensorFlow's guide, makes the trace a step of TensorBoard's profile
    return profiler.Profile, functools.partial(profiler.Trace, "train", _r=1)
