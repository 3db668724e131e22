"""A note in the key-value store of JAX's coordination service about each process that has ended.

A process that ends, well or by an error, says so before JAX's own clean-up, which waits for all others. So those that
wait for it learn within seconds that it does not come. The note is written by a function that Python calls at its exit;
one that is killed writes none, and is noticed by the service.

This file imports nothing of ours, because `import diffshard` imports it where JAX has been imported: what is registered
later is called earlier, and JAX registers its own clean-up when it is imported.
"""

import atexit
import contextlib
import os
import sys
from typing import Any

from jax.experimental import multihost_utils

ENDED = "diffshard/ended"
"""Where the notes are, by the numbers of processes."""


def service_state() -> Any:
    """Returns JAX's state of the coordination service in this process; None if JAX has it elsewhere."""
    return getattr(getattr(multihost_utils, "distributed", None), "global_state", None)


def _leave_notice(process_id: int) -> None:
    """Writes the note about this process, with the error that has ended it, if any."""
    state = service_state()
    if os.getpid() != process_id or getattr(state, "client", None) is None:  # a forked child is no process of the job
        return
    error = getattr(sys, "last_value", None)  # set by Python when nobody has caught it
    text = f"process {state.process_id} has ended" + ("" if error is None else f" with {type(error).__name__}: {error}")
    with contextlib.suppress(Exception):  # the service may be gone
        state.client.key_value_set_bytes(f"{ENDED}/{state.process_id}", text.encode())


atexit.register(_leave_notice, os.getpid())
