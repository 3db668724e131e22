"""JAX's coordination service: its key-value store, and a note in it about each process that has ended.

A process that ends, well or by an error, says so before JAX's own clean-up, which waits for all others. So those that
wait for it learn within seconds that it does not come. The note is written by a function that Python calls at its exit;
one that is killed writes none, and is noticed by the service.

JAX has no public name for the client of that service. It is reached through `jax.experimental.multihost_utils`, whose
`distributed` is a private module of JAX. Relied upon are `distributed.global_state`, its `process_id`, its `client`,
None without the service, and the client's methods in `_METHODS`; a version of JAX without them is named in an error.
"""

import atexit
import contextlib
import os
import sys
from typing import Any

import jax
from jax.experimental import multihost_utils

from diffshard.base import ProcessesError

_METHODS = ("key_value_set_bytes", "blocking_key_value_get_bytes", "key_value_try_get_bytes", "key_value_delete")
"""The methods of the service's client that are used. The last one deletes a place and everything below it."""
_ENDED = "diffshard/ended"
"""Where the notes about processes that have ended are, by their numbers."""


def service_client() -> Any:
    """Returns the client of JAX's coordination service; None where it does not run.

    Raises:
      ProcessesError: this version of JAX has no such client, or another one.
    """
    state = _service_state()
    client = getattr(state, "client", None)
    if not hasattr(state, "client") or (client is not None and not all(hasattr(client, name) for name in _METHODS)):
        raise ProcessesError(
            f"JAX {jax.__version__} has another coordination service than diffshard {_version()} knows, so that "
            "several processes cannot agree. Take the version of JAX with which diffshard was released, or a newer "
            "diffshard."
        )
    return client


def how_ended(client: Any, process: int) -> str | None:
    """Returns a sentence on how a process has ended; None while it runs, or if it was killed."""
    try:
        return client.key_value_try_get_bytes(f"{_ENDED}/{process}").decode()
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def _service_state() -> Any:
    return getattr(getattr(multihost_utils, "distributed", None), "global_state", None)


def _version() -> str:
    import diffshard  # the package, which imports its modules when they are first used

    return diffshard.__version__


def _tell_ending(process_id: int) -> None:
    """Writes the note about this process, with the error that has ended it, if any."""
    state = _service_state()
    if os.getpid() != process_id or getattr(state, "client", None) is None:  # a forked child is no process of the job
        return
    error = getattr(sys, "last_value", None)  # set by Python when nobody has caught it
    text = f"process {state.process_id} has ended" + ("" if error is None else f" with {type(error).__name__}: {error}")
    with contextlib.suppress(Exception):  # the service may be gone
        state.client.key_value_set_bytes(f"{_ENDED}/{state.process_id}", text.encode())


# What is registered later is called earlier, and JAX has registered its own clean-up when it was imported above.
atexit.register(_tell_ending, os.getpid())
