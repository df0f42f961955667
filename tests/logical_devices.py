"""One processor as several devices, for the replicas of a file's process."""

import keras


def divide_processor(num_devices):
    """Make logical devices of the processor, before anything is computed in this process."""
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_num_cpu_devices", num_devices)
        assert jax.device_count() == num_devices
    else:
        import tensorflow as tf

        processor = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(num_devices)]
        tf.config.set_logical_device_configuration(processor, parts)
