"""Arrays of a state in files, by orbax: each process writes and reads the parts that its own devices hold.

A state is saved as a flat dictionary from paths to arrays. So it can be read without the classes of its pytree, by
orbax alone, too. Random keys are stored as their words, and arrays without elements, of which orbax has no form, are
not stored.
"""

import contextlib
import errno
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from orbax import checkpoint as orbax

_BLOCK_BYTES = 2**20
"""The largest block that is read as a whole. Another mesh's parts cut through old ones, and with a device's whole part
as a block a process read nearly three times what it held; blocks of a MiB hardly make saving slower."""


class _Handler(orbax.StandardCheckpointHandler):
    """Orbax's own form of saving, which finishes a checkpoint before its folder gets its name."""

    def __init__(self):
        super().__init__()
        self._finish: Callable[[str], None] | None = None

    async def async_save(self, directory: Any, item: Any = None, save_args: Any = None, args: Any = None) -> Any:
        """Begins to save; what finishes the checkpoint comes with the arguments."""
        assert isinstance(args, _Save)
        self._finish = args.finish  # orbax waits for the save before, so that there is one at a time
        return await super().async_save(directory, item, save_args, args)

    def finalize(self, directory: Any) -> None:
        """Completes the files in the temporary folder; called in the first process when all have written theirs."""
        super().finalize(directory)
        assert self._finish is not None
        self._finish(str(directory))


@orbax.args.register_with_handler(_Handler, for_save=True)
@dataclass
class _Save(orbax.args.StandardSave):
    """The arguments of `_Handler.save`, with a function that finishes the checkpoint in its folder."""

    finish: Callable[[str], None] = lambda folder: None


@orbax.args.register_with_handler(_Handler, for_restore=True)
@dataclass
class _Restore(orbax.args.StandardRestore):
    """The arguments of `_Handler.restore`."""


class ArrayFiles:
    """Saves and restores flat arrays; saving goes on in the background."""

    def __init__(self):
        self._checkpointer = orbax.AsyncCheckpointer(_Handler())

    def save(self, folder: str, arrays: Mapping[str, Any], finish: Callable[[str], None]) -> None:
        """Copies arrays off the devices, and lets a thread write them to a folder, which appears when it is whole.

        Waits first until the save before is written. All processes call this.

        Args:
          finish: called in the first process with a temporary folder that has all arrays, before it is renamed.

        Raises:
          OSError: the save before could not be written.
        """
        stored = {name: _words(array) for name, array in arrays.items() if array.size}
        blocks = {name: orbax.SaveArgs(chunk_byte_size=_BLOCK_BYTES) for name in stored}
        with _file_errors():
            self._checkpointer.save(folder, args=_Save(stored, save_args=blocks, finish=finish))

    def restore(self, folder: str, targets: Mapping[str, jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Reads arrays into their shardings; each process reads the parts of its own devices.

        Raises:
          OSError: a file cannot be read.
        """
        stored = {name: _stored_target(target) for name, target in targets.items() if target.size}
        with _file_errors():
            restored = self._checkpointer.restore(folder, args=_Restore(stored)) if stored else {}
        return [
            _as_target(restored[name], target) if name in restored else _without_elements(target)
            for name, target in targets.items()
        ]

    def wait(self) -> None:
        """Waits until the last save is written.

        Raises:
          OSError: it could not be written.
        """
        with _file_errors():
            self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """Ends the threads, when the last save is written or has failed."""
        with _file_errors():
            self._checkpointer.close()


@contextlib.contextmanager
def _file_errors() -> Iterator[None]:
    """Raises as `OSError` what TensorStore, which reads and writes for orbax, says of files by `ValueError`."""
    try:
        yield
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, str(error)) from error


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _words(array: Any) -> Any:
    return jax.random.key_data(array) if _is_key(array) else array


def _stored_target(target: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns how an array is stored, where it is a random key as words that are on one device."""
    if not _is_key(target):
        return target
    words = jax.eval_shape(jax.random.key_data, target)
    sharding = target.sharding
    assert isinstance(sharding, NamedSharding)
    spec = PartitionSpec(*sharding.spec, *[None] * (words.ndim - len(sharding.spec)))
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=NamedSharding(sharding.mesh, spec))


def _as_target(array: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    if not _is_key(target):
        return array
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), target)  # it takes keys, but no shapes of keys
    wrap = functools.partial(jax.random.wrap_key_data, impl=impls[0])
    return jax.jit(wrap, out_shardings=target.sharding)(array)


def _without_elements(target: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.jit(functools.partial(jnp.zeros, target.shape, target.dtype), out_shardings=target.sharding)()
