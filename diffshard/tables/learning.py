"""`learn_table_cost`: measures lookups, updates and exchanges on the devices at hand, and trains networks on them."""

import datetime
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import jax

from cost.pooled_networks import fit
from cost.real_numbers import whole_number
from diffshard.solving.flat import numpy_generator
from diffshard.tables.learned_cost import LearnedTableCost
from diffshard.tables.measurements import Samples, device_samples, exchange_samples

_MEASURED = "host_tables.npz"
"""The cost that comes with the package, learned by `python -m experiments.embedding_tables.learned --learn`."""
LEAST_SAMPLES = 10


def learn_table_cost(
    devices: Sequence[Any] | None = None,
    *,
    num_samples: int = 600,
    num_exchanges: int = 400,
    key: jax.Array | int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> LearnedTableCost:
    """Measures random pieces of tables on a device, and random exchanges between devices, and trains networks on them.

    A sample takes about 3 seconds, most of them for compiling, and up to a few GiB of the device's memory. The cost
    serves any tables on devices of this kind after that; `cost.save` keeps it. Host devices share cores, so that they
    are timed by what they take of the processor.

    >>> cost = learn_table_cost()
    >>> plan = shard_tables(tables, mesh, cost=cost)

    Args:
      devices: JAX devices of one kind; pieces are measured on the first. None takes all of this process.
      num_samples: random sets of pieces.
      num_exchanges: random exchanges between 2, 4, 8, ... of the devices; one device measures none.
      key: draws the samples and the first weights.
      progress: called as `progress(samples, of)` after each sample.

    Raises:
      TypeError, ValueError: an argument breaks its rule; the error names it and its value.
    """
    devices = list(jax.local_devices() if devices is None else devices)
    if not devices or not all(isinstance(device, jax.Device) for device in devices):
        raise TypeError(f"`devices` must be a list of JAX devices, not {devices!r}.")
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        raise ValueError(f"`devices` must be of one kind, not of {', '.join(kinds)}; learn a cost for each kind.")
    for name, number in (("num_samples", num_samples), ("num_exchanges", num_exchanges)):
        if (whole_number(number) or 0) < LEAST_SAMPLES:
            raise ValueError(f"`{name}` must be a whole number of at least {LEAST_SAMPLES}, not {number!r}.")
    if progress is not None and not callable(progress):
        raise TypeError(f"`progress` must be a function of two numbers, not {progress!r}.")
    key = jax.random.key(key) if isinstance(key, int) else key
    rng = numpy_generator(key)
    total, done = num_samples + (num_exchanges if len(devices) > 1 else 0), 0

    def each() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    pieces = device_samples(num_samples, devices[0], rng, each)
    exchanges = exchange_samples(num_exchanges, devices, rng, each) if len(devices) > 1 else None
    return trained_cost(pieces, exchanges, devices, key)


def trained_cost(
    pieces: Samples, exchanges: Samples | None, devices: Sequence[Any], key: jax.Array
) -> LearnedTableCost:
    """Trains networks on samples that were measured on devices; `key` draws the first weights."""
    keys = iter(jax.random.split(key, 4))
    networks = {
        "lookups": fit(pieces.features, pieces.forward_s, next(keys)),
        "updates": fit(pieces.features, pieces.backward_s, next(keys)),
        "row_exchange": exchanges and fit(exchanges.features, exchanges.forward_s, next(keys)),
        "gradient_exchange": exchanges and fit(exchanges.features, exchanges.backward_s, next(keys)),
    }
    return LearnedTableCost(
        device=devices[0].device_kind,
        date=datetime.date.today().isoformat(),
        jax_version=jax.__version__,
        num_devices=len(devices),
        **networks,
    )


def host_table_cost() -> LearnedTableCost:
    """Returns the cost that comes with the package, learned on host devices of one machine, a virtual one with 2 cores.

    It shows what a learned cost does, and plans tests on CPUs; for other devices, `learn_table_cost` measures.
    """
    with resources.as_file(resources.files("diffshard.tables").joinpath(_MEASURED)) as path:
        return LearnedTableCost.load(path)
