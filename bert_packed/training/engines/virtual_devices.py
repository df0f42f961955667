"""More devices than the machine has, on its CPU: to compile for them, not to compute faster."""

import keras


def make_virtual_devices(number):
    """Let the backend see so many devices and no others.

    Args:
        number: Of devices, at least 1.

    Raises:
        RuntimeError: the backend has computed something already in this process, and so counted its devices.
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
