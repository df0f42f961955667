"""Variables that are spread over devices, as one reads and writes them: whole, and without what is added."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from bert_packed.parallel.mesh import lay


class LaidVariable:
    """A Keras variable whose array lies on the devices of a mesh.

    Args:
        variable: The Keras variable.
        mesh, spec: How its array lies.
        shape: Without what the layout adds.
    """

    def __init__(self, variable, mesh, spec, shape):
        self.path, self.dtype, self.shape = variable.path, variable.dtype, tuple(shape)
        self._variable, self._mesh, self._spec = variable, mesh, spec

    def numpy(self):
        """The array in the host's memory; where it lies in several processes, all must ask together."""
        value = self._variable.value
        is_here = not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated
        whole = np.asarray(value) if is_here else multihost_utils.process_allgather(value, tiled=True)
        return whole[tuple(slice(length) for length in self.shape)]

    def assign(self, values):
        """Put an array of `shape` in its place; what is added stays 0."""
        whole = np.zeros(self._variable.shape, self.dtype)
        whole[tuple(slice(length) for length in self.shape)] = values
        self._variable.assign(lay(whole, self._mesh, self._spec))


class HostVariable:
    """What a `LaidVariable` holds, in the host's memory.

    Args:
        variable: It.
        keeps: Whether it is going to be read; if not, this process only helps others to get it.
    """

    def __init__(self, variable, keeps=True):
        values = variable.numpy()
        self._values = values if keeps else None

    def numpy(self):
        return self._values
