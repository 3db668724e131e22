"""The client of JAX's coordination service, and what its key-value store says about processes that have ended.

A process that ends leaves a note (`endings.py`). One that is killed cannot: JAX's service notices that it sends nothing
any more, after a hundred seconds if the user does not say otherwise, and aborts all others, which cannot be caught. So
each process that has come to an exchange writes a new number into the store every few seconds, its pulse, and the
others find in time that it has stopped.

JAX has no public name for the client of that service. It is reached through `jax.experimental.multihost_utils`, whose
`distributed` is a private module of JAX. Relied upon are `distributed.global_state`, its `process_id`, its `client`,
None without the service, and the client's methods in `_METHODS`; a version of JAX without them is named in an error.
"""

import atexit
import itertools
import threading
from typing import Any

import jax

from diffshard.base import ProcessesError
from diffshard.endings import ENDED, service_state

_METHODS = ("key_value_set_bytes", "blocking_key_value_get_bytes", "key_value_try_get_bytes", "key_value_delete")
"""The methods of the service's client that are used. The last one deletes a place and everything below it."""
_PULSE = "diffshard/pulse"
"""Where the pulses are, by the numbers of processes."""
PULSE_S = 2.0
"""Seconds between two numbers: nothing for the service, also with a thousand processes."""
SILENCE_S = 40.0
"""Seconds without a new number after which a process counts as lost: many numbers that did not come. It is well below
the time after which JAX aborts, and above what a library may compute without letting another thread run."""


def service_client() -> Any:
    """Returns the client of JAX's coordination service; None where it does not run."""
    state = service_state()
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
    return _found(client, f"{ENDED}/{process}")


def pulse_of(client: Any, process: int) -> str | None:
    """Returns the last number of a process; None if it has written none."""
    return _found(client, f"{_PULSE}/{process}")


def keep_pulse(client: Any) -> None:
    """Writes this process's pulse, in a thread, until the process or the service ends."""
    is_over, key = threading.Event(), f"{_PULSE}/{jax.process_index()}"

    def beat() -> None:
        for number in itertools.count():
            try:
                client.key_value_set_bytes(key, str(number).encode(), allow_overwrite=True)
            except Exception:  # the service has ended, or been left
                return
            if is_over.wait(PULSE_S):
                return

    thread = threading.Thread(target=beat, name="diffshard pulse", daemon=True)
    thread.start()

    def end() -> None:  # before Python's own end, which must not meet the thread in the client
        is_over.set()
        thread.join()

    atexit.register(end)


def _found(client: Any, key: str) -> str | None:
    try:
        return client.key_value_try_get_bytes(key).decode()
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def _version() -> str:
    import diffshard  # the package, which imports its modules when they are first used

    return diffshard.__version__
