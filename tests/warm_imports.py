"""What programs of tests begin with, imported in the processes that they are forked from; starts no backend of JAX."""

import gc
import warnings

import jax.numpy
import optax  # noqa: F401

import diffshard

_ = diffshard.search, jax.numpy.zeros  # public names are imported when they are first used

gc.collect()
gc.freeze()
gc.set_threshold(50_000, 20, 20)  # as `tests/conftest.py` does, and for the same reason
# JAX warns of its threads at each fork. None of them runs before the first backend starts, which is after the fork.
warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
