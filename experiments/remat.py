"""What is kept from forward to backward under a memory limit, against `jax.checkpoint` on every layer.

    python -m experiments.remat [--models gpt mlp] [--shares 0.9 0.7 0.5] [--target h100|host] [--plans remat checked]
    python -m experiments.remat --models gpt --plans int8 float8
    python -m experiments.remat --models decoder --shares 0.9 --plans state ordinary remat

Each model gets less memory than any sharding alone needs. `search(..., remat="search")` then chooses what is computed
again; with `check="compile"` ("checked") the limit holds for XLA's plan of the memory. Plans called by a format keep
arrays for the backward pass in it, whatever the loss says, where the limit asks for that. "state" lets the optimiser's
moments be in the host's memory (`search(..., state="offload")`), "ordinary" only splits arrays. Experts put
`jax.checkpoint` around each layer, and let the ordinary search split the arrays. All plans are compiled for H100s that
need not be there (`pip install '.[gpu-compile]'`). XLA's plan of the memory is set beside the predicted peak,
its timeline beside the predicted step.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

import diffshard
from cost.memory import least_memory
from diffshard.checks.hlo import memory_plan
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.timeline import simulate
from diffshard.sharding_search.number_formats import KEPT
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from experiments.host_devices import parse_mesh
from experiments.models import gpt, mlp, scanned_layers, unet
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES
from experiments.timeline_models import CASES
from search_spaces.sharding.codes import CODES

_GPT = partial(gpt.make, batch=64, layers=4, width=512, heads=8, key_value_heads=8, vocabulary=4096, sequence=512)
MODELS: dict[str, Callable[[], Model]] = {
    "gpt": _GPT,
    "gpt-scanned": partial(_GPT, stack=gpt.scanned),
    "mlp": lambda: mlp.make(layers=8, width=1024, batch=65536),
    "decoder": lambda: CASES["decoder"].make(batch=16, **CASES["decoder"].full),
    # These were set aside until the search was finished.
    "mixer": scanned_layers.mixer,
    "llama": scanned_layers.llama,
    "u-net": lambda: unet.make(batch=256, width=64, levels=2, blocks=1, heads=4, image=32),
}
EXPERTS: dict[str, Callable[[], Model]] = {
    "gpt": partial(_GPT, block=nn.remat(gpt.Block)),
    "gpt-scanned": partial(_GPT, stack=gpt.scanned, block=nn.remat(gpt.Block)),
}
COLUMNS = (
    "model", "limit", "of the least", "plan", "step ms", "timeline ms", "bound ms", "peak MB: predicted", "XLA",
    "again ms", "host MB", "search s",
)  # fmt: skip
TIME_LIMIT_S = 60.0


class Result(NamedTuple):
    """A plan under a limit, or the lack of one.

    Attributes:
      model, share, limit_bytes: what was asked for; the share of the least memory that sharding alone needs.
      plan: which plan it is.
      step_s, bound_s, peak_bytes: its predictions; None if there is no plan.
      compiled_bytes: XLA's peak; None if there is no plan or no compiler.
      timeline_s: of XLA's program for H100s by its timeline; None for host devices.
      recomputed_s: predicted seconds of what runs again; None for plans that the search did not choose it for.
      host_bytes: of each device's state in the host's memory.
      search_s: how long the search took.
    """

    model: str
    share: float
    limit_bytes: float
    plan: str
    step_s: float | None
    bound_s: float | None
    peak_bytes: float | None
    compiled_bytes: float | None
    timeline_s: float | None
    recomputed_s: float | None
    host_bytes: float
    search_s: float


def least_bytes(model: Model, mesh: Mesh, hardware: diffshard.Hardware) -> float:
    """Returns the least memory that any sharding of a model's step needs on a device if nothing is computed again."""
    options = Options(fn=model.step, mesh=mesh, hardware=hardware, memory_limit_bytes=float("inf"), donate_argnums=(0,))
    space = space_of(options, trace_function(options, abstract_arguments(model)))
    return float(np.max(least_memory(space.problem)[1]))


def measure(
    name: str, model: Model, mesh: Mesh, share: float, limit_bytes: float, plan_name: str, target: str
) -> Result:
    """Plans a model's step within a limit and compiles it."""
    remat = "search" if plan_name in ("remat", "checked") else None
    kept = None
    if plan_name in CODES:
        any_loss = {f"{KEPT} in {plan_name}": 0.0}
        kept = diffshard.formats.Formats(1.0, increases=any_loss, products=(), kept=[plan_name])
    step = diffshard.search(
        model.step,
        mesh,
        hardware="h100",
        memory_limit_bytes=limit_bytes,
        donate_argnums=0,
        remat=remat,
        state="offload" if plan_name == "state" else None,
        formats=kept,
        time_limit_s=None if remat else TIME_LIMIT_S,
        check="compile" if plan_name == "checked" else None,
        target=target if plan_name == "checked" else None,
    )
    start_s = time.perf_counter()
    try:
        plan = step.plan(*abstract_arguments(model))
    except diffshard.InfeasibleError:
        took_s = time.perf_counter() - start_s
        return Result(name, share, limit_bytes, plan_name, None, None, None, None, None, None, 0.0, took_s)
    search_s = time.perf_counter() - start_s
    compiled = step.lower(*abstract_arguments(model)).compile()
    memory = memory_plan(compiled)
    timeline = simulate(compiled.as_text() or "", mesh.shape, achievable_rates(plan.hardware))
    return Result(
        name,
        share,
        limit_bytes,
        plan_name,
        plan.step_s,
        plan.lower_bound_s,
        plan.peak_bytes,
        None if memory is None else memory.peak,
        timeline.step_s if target == "h100" else None,
        None if plan.remat is None else plan.remat.seconds,
        plan.host_bytes,
        search_s,
    )


def cells(result: Result) -> tuple[str, ...]:
    """Returns the cells of a result's row in the table."""

    def scaled(number: float | None, unit: float, digits: int) -> str:
        return "" if number is None else f"{number / unit:.{digits}f}"

    return (
        result.model,
        scaled(result.limit_bytes, 1e6, 0),
        f"{result.share:.2f}" if np.isfinite(result.share) else "any",
        result.plan if result.step_s is not None else f"{result.plan}: none fits",
        scaled(result.step_s, 1e-3, 2),
        scaled(result.timeline_s, 1e-3, 2),
        scaled(result.bound_s, 1e-3, 2),
        scaled(result.peak_bytes, 1e6, 0),
        scaled(result.compiled_bytes, 1e6, 0),
        scaled(result.recomputed_s, 1e-3, 2),
        scaled(result.host_bytes or None, 1e6, 0),
        scaled(result.search_s, 1, 0),
    )


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Plans and compiles the models under their limits, prints the table, and returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name != "decoder"])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.9, 0.7, 0.5])
    names = ("ordinary", "state", "remat", "checked", *CODES)
    parser.add_argument("--plans", nargs="+", choices=names, default=["remat", "checked"])
    parser.add_argument("--mesh", default="8")
    parser.add_argument("--target", choices=MESHES, default="h100")
    args = parser.parse_args(argv)
    mesh = MESHES[args.target](parse_mesh(args.mesh))
    results = []

    def add(*arguments: object) -> None:
        results.append(measure(*arguments, args.target))  # pyright: ignore[reportArgumentType, reportCallIssue]
        print(" | ".join(cells(results[-1])), flush=True)

    for name in args.models:
        model = MODELS[name]()
        least = least_bytes(model, mesh, diffshard.preset("h100", dict(mesh.shape)))
        add(name, model, mesh, float("inf"), 80e9, "ordinary")
        if name in EXPERTS:
            add(name, EXPERTS[name](), mesh, float("inf"), 80e9, "checkpoint")
        for share in args.shares:
            for plan_name in args.plans:
                add(name, model, mesh, share, share * least, plan_name)
            if name in EXPERTS:
                add(name, EXPERTS[name](), mesh, share, share * least, "checkpoint")
    print_table(
        f"Plans under memory limits, on a {args.mesh} mesh of {args.target}",
        COLUMNS,
        [cells(result) for result in results],
    )
    return results


if __name__ == "__main__":
    main()
