"""The client of JAX's coordination service, and what its key-value store says about processes that have ended.

JAX has no public name for the client of that service. It is reached through `jax.experimental.multihost_utils`, whose
`distributed` is a private module of JAX. Relied upon are `distributed.global_state`, its `process_id`, its `client`,
None without the service, and the client's methods in `_METHODS`; a version of JAX without them is named in an error.
"""

from typing import Any

import jax

from diffshard.base import ProcessesError
from diffshard.endings import ENDED, service_state

_METHODS = ("key_value_set_bytes", "blocking_key_value_get_bytes", "key_value_try_get_bytes", "key_value_delete")
"""The methods of the service's client that are used. The last one deletes a place and everything below it."""


def service_client() -> Any:
    """Returns the client of JAX's coordination service; None where it does not run.

    Raises:
      ProcessesError: this version of JAX has no such client, or another one.
    """
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
    try:
        return client.key_value_try_get_bytes(f"{ENDED}/{process}").decode()
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def _version() -> str:
    import diffshard  # the package, which imports its modules when they are first used

    return diffshard.__version__
