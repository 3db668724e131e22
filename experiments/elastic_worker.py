"""One process of a training that can be interrupted; `experiments.elastic` starts it.

It trains a small GPT by adamw with dropout of its inputs, whose random key is part of the state, so that the loss tells
whether the whole state was restored. It reports each step, and what planning and restoring took.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import diffshard
from experiments.job import join, report
from experiments.models import gpt


def main() -> None:
    """Trains as the settings of the job say."""
    settings, num_processes, devices_each = join()
    mesh = jax.make_mesh((num_processes, devices_each), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    step, init, batch_of = (
        wide_step(settings.get("rows", 6144)) if settings["sizes"] is None else gpt_step(**settings["sizes"])
    )
    try:
        began = time.perf_counter()
        training = diffshard.resume(
            settings["directory"], step, mesh, init, batch_of(0), hardware="h100", donate_argnums=0,
            save_interval_steps=settings["save_interval_steps"], progress="none",
        )  # fmt: skip
        report(event="planned", seconds=time.perf_counter() - began, num_steps=training.num_steps)
        with memory_and_reading() as used:
            state = jax.block_until_ready(training.restore())
        local = sum(shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in _addressable(leaf))
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        report(event="restored", **used, local_bytes=local, total_bytes=total)
        plan = training.plan
        assert isinstance(plan, diffshard.Plan)
        for number in range(training.num_steps, settings["until"]):
            state, loss = training.step(state, plan.shard(batch=batch_of(number)))
            report(event="step", number=number, loss=float(loss))
            training.save(number + 1, state, {"batches": number + 1})
        with memory_and_reading() as used:
            training.close()
        report(event="closed", **used)
    except jax.errors.JaxRuntimeError as error:  # another process has died; the launcher starts those that are left
        report(event="error", text=f"{type(error).__name__}: {str(error)[:300]}")
        os._exit(1)


def gpt_step(**sizes: Any) -> tuple[Any, Any, Any]:
    """Makes a step of a GPT whose state has a random key, its first state and its batches."""
    model = gpt.make(**sizes)

    def init() -> Any:
        return {"model": model.init(jax.random.key(0)), "key": jax.random.key(1)}

    def train_step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        key, mask_key = jax.random.split(state["key"])
        tokens = jnp.where(jax.random.bernoulli(mask_key, 0.9, batch.shape), batch, 0)
        new, loss = model.step(state["model"], tokens)
        return {"model": new, "key": key}, loss

    return train_step, init, lambda number: model.make_batch(jax.random.fold_in(jax.random.key(2), number))


def wide_step(rows: int) -> tuple[Any, Any, Any]:
    """Makes a step with little arithmetic and a state of 64 KiB a row of random numbers, which no file compresses."""

    def init() -> Any:
        return {f"w{i}": jax.random.normal(jax.random.key(i), (rows, 2048)) for i in range(8)}

    def train_step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        new = {name: 0.5 * w for name, w in state.items()}
        return new, jnp.stack([jnp.mean(batch @ w) for w in new.values()]).sum()

    return train_step, init, lambda number: jnp.full((24, rows), float(number))


@contextmanager
def memory_and_reading() -> Iterator[dict[str, float]]:
    """Measures by how much the memory of this process has grown at most, and how many bytes it has read from files."""
    used: dict[str, float] = {}
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before, read = _status("VmRSS"), _read_bytes()
    began = time.perf_counter()
    yield used
    used.update(
        seconds=time.perf_counter() - began, grown_bytes=_status("VmHWM") - before, read_bytes=_read_bytes() - read
    )


def _status(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _addressable(leaf: Any) -> Any:
    return () if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.addressable_shards


if __name__ == "__main__":
    main()
