"""How true the cost model is: arithmetic and whole steps against this machine.

    python -m experiments.calibration

Collectives have an experiment of their own, `python -m experiments.collectives`.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from cost.base import Hardware
from cost.calibration import calibrate, median_s
from cost.compute import equation_work, jaxpr_flops
from diffshard import search
from experiments.models import gpt, mlp, resnet
from experiments.models.model import Model
from experiments.models.model import arguments as arguments_of

MODELS: dict[str, Callable[[int], Model]] = {
    "wide batch": lambda width: mlp.make(layers=6, width=2 * width, batch=4 * width),
    "wide layers": lambda width: mlp.make(layers=6, width=4 * width, batch=width // 8),
    "gpt": lambda width: gpt.make(batch=8, width=width, sequence=width // 2, vocabulary=8 * width),
    "resnet": lambda width: resnet.make(batch=max(8, width // 8)),
}


def elementwise_weights(size: int, repeats: int) -> dict[str, float]:
    """Measures seconds of elementwise functions relative to those of a multiply-add, on arrays that stay in cache."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "div": lambda x: 1.5 / x,
        "sqrt": jnp.sqrt,
        "exp": jnp.exp,
        "log": jnp.log,
        "tanh": jnp.tanh,
        "logistic": jax.nn.sigmoid,
        "sin": jnp.sin,
        "pow": lambda x: x**1.3,
        "erf": jax.lax.erf,
        "lgamma": jax.lax.lgamma,
    }
    x = jnp.linspace(0.5, 1.5, size, dtype=jnp.float32)
    base_s = _loop_s(lambda x: x * 0.999 + 0.001, x, repeats)
    return {name: 2 * _loop_s(f, x, repeats) / base_s for name, f in functions.items()}


def _loop_s(function: Callable[[jax.Array], jax.Array], x: jax.Array, repeats: int) -> float:
    def body(_: int, x: jax.Array) -> jax.Array:
        return jnp.clip(function(x), 0.5, 1.5)

    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 200, body, x))
    return median_s(lambda: loop(x), repeats)


class StepWork(NamedTuple):
    """A whole training step on one device: the prediction, XLA's counts, and the measured time.

    Attributes:
      flops, compiled_flops: operations as predicted, and as XLA counts them in the compiled program.
      moved_bytes, unfused_bytes, compiled_bytes: memory traffic as predicted, as it would be if nothing were fused, and
        as XLA counts it.
      predicted_s, measured_s: seconds of the step.
    """

    model: str
    flops: float
    compiled_flops: float
    moved_bytes: float
    unfused_bytes: float
    compiled_bytes: float
    predicted_s: float
    measured_s: float


def whole_step(model: Model, hardware: Hardware, repeats: int) -> StepWork:
    """Runs a step on one device and predicts it.

    Args:
      model: the model with the step.
      hardware: calibrated on one device; predicts the seconds.
      repeats: number of steps, whose median is the measured time.
    """
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("one",))
    state, batch = arguments_of(model)

    def predicted(hardware: Hardware) -> float:
        step = search(model.step, mesh, hardware=hardware, memory_limit_bytes=np.inf, solver="exhaustive")
        return step.plan(state, batch).compute_s

    moved_bytes = predicted(Hardware("a second for each byte", np.inf, 1.0, np.inf, {}))
    compiled = jax.jit(model.step, donate_argnums=0).lower(state, batch).compile()
    cost = compiled.cost_analysis() or {}
    jaxpr = jax.make_jaxpr(model.step)(state, batch)
    unfused_bytes = sum(_unfused_bytes(equation) for equation in jaxpr.jaxpr.eqns)
    states = [state]

    def call() -> jax.Array:  # reuses the memory of its state, as in training; new pages would take as long again
        new, loss = compiled(states.pop(), batch)
        states.append(new)
        return loss

    predicted_s, measured_s = predicted(hardware), median_s(call, repeats)
    compiled_flops, compiled_bytes = cost.get("flops", np.nan), cost.get("bytes accessed", np.nan)
    work = (jaxpr_flops(jaxpr), compiled_flops, moved_bytes, unfused_bytes, compiled_bytes)
    return StepWork(model.name, *work, predicted_s, measured_s)


def _unfused_bytes(equation: core.JaxprEqn) -> float:
    bodies = [p for p in equation.params.values() if isinstance(p, core.ClosedJaxpr)]
    if bodies:
        return sum(_unfused_bytes(inner) for body in bodies for inner in body.jaxpr.eqns)
    return equation_work(equation).num_bytes


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=8192, help="elements of an elementwise function")
    parser.add_argument("--matrix-size", type=int, default=1024)
    parser.add_argument("--largest-bytes", type=int, default=2**26, help="of the arrays that links and memory move")
    parser.add_argument("--width", type=int, default=256, help="of the models whose steps are timed")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    print("elementwise functions, operations relative to an addition")
    for name, weight in elementwise_weights(options.size, options.repeats).items():
        print(f"  {name:10} {weight:6.1f}")
    mesh = jax.make_mesh((len(jax.devices()),), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    measured = partial(calibrate, matrix_size=options.matrix_size, largest_bytes=options.largest_bytes)
    print("\nthis machine:", measured(mesh, repeats=options.repeats))
    one = jax.sharding.Mesh(jax.devices()[:1], ("one",))
    hardware = measured(one, dtypes=("float32",), repeats=options.repeats)
    print("\nsteps on one device, predicted / XLA's own count: operations, bytes, bytes without fusion; and seconds")
    for make in options.models:
        model = MODELS[make](options.width)
        w = whole_step(model, hardware, options.repeats)
        print(
            f"  {w.model:16} {w.flops / w.compiled_flops:6.2f} {w.moved_bytes / w.compiled_bytes:6.2f} "
            f"{w.unfused_bytes / w.compiled_bytes:6.2f}   {w.predicted_s * 1e3:8.2f} ms / {w.measured_s * 1e3:.2f} ms"
        )


if __name__ == "__main__":
    main()
