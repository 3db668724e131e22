"""An array over layers that several pipeline stages keep, each its own layers."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


class StagedArray:
    """An array whose layers are on several stages: what a step returns of stacked weights, and takes in the next call.

    It is a leaf of its pytree, as the whole array is. `numpy.asarray` copies all layers to the host,
    `jax.numpy.asarray` from there to one device. Other functions of JAX do not take it.

    Args:
      parts: the layers of each stage, in order.
      dim: the dimension over the layers.
    """

    def __init__(self, parts: Sequence[Any], dim: int):
        self.parts, self.dim = list(parts), dim

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    @property
    def dtype(self) -> Any:
        """The type of its elements."""
        return self.parts[0].dtype

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return self.parts[0].ndim

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of layers of each part."""
        return tuple(part.shape[self.dim] for part in self.parts)

    @property
    def size(self) -> int:
        """The number of its elements."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return sum(part.nbytes for part in self.parts)

    @property
    def weak_type(self) -> bool:
        """Whether its type gives way to others, as that of a Python number does."""
        return bool(getattr(self.parts[0], "weak_type", False))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("A StagedArray is on several devices, so that `copy` cannot be False.")
        return np.concatenate([np.asarray(part) for part in self.parts], axis=self.dim).astype(dtype or self.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"StagedArray(shape={self.shape}, dtype={self.dtype}, layers={self.sizes})"

    def block_until_ready(self) -> "StagedArray":
        """Waits until all parts are computed; returns itself."""
        jax.block_until_ready(self.parts)
        return self
