"""What the schedule of a device program is worth: a plan in XLA's own order, and with windows of several lengths.

    python -m experiments.schedule [--model decoder] [--mesh 4x8] [--batch 32] [--windows 12 24 48]

A model of `experiments.timeline` is planned once and compiled for H100s that need not be there (the extra
`gpu-compile`); the timeline plays each program back. The first two rows have no barriers, and let XLA have one or four
collectives under way at a time. `played` is what `plan.timeline` says before anything is compiled.
"""

import argparse
import contextlib
import math
from collections.abc import Iterator, Sequence

import diffshard
from cost.streams import play
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.timeline import COMPUTE, simulate
from diffshard.sharding_search.layout import layout_of
from experiments.host_devices import parse_mesh
from experiments.models.model import abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES
from experiments.timeline_descent import searched
from experiments.timeline_models import CASES
from search_spaces.sharding import scheduling

AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
# Latencies of the slowest link in a window (inf: no barriers), and collectives that XLA has under way at a time.
VARIANTS = ((math.inf, 1), (math.inf, 4), (6, 4), (12, 4), (24, 1), (24, 4), (40, 4))
COLUMNS = (
    "latencies in a window",
    "collectives at a time",
    "played ms",
    "timeline ms",
    "computing ms",
    "waiting ms",
    "peak GiB",
)


@contextlib.contextmanager
def windows_of(latencies: float) -> Iterator[None]:
    """Sets how long the windows of schedules are at least inside a `with`, in latencies of the slowest link."""
    usual = scheduling._LATENCIES_IN_WINDOW
    scheduling._LATENCIES_IN_WINDOW = latencies
    try:
        yield
    finally:
        scheduling._LATENCIES_IN_WINDOW = usual


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CASES, default="decoder")
    parser.add_argument("--mesh", default="4x8", help="data x model, in hosts of 8")
    parser.add_argument("--batch", type=int, help="rows in a batch, instead of the published ones for the mesh")
    parser.add_argument("--windows", nargs="+", type=float, help="their lengths in latencies, in place of all variants")
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--target", choices=MESHES, default="h100", help="what the programs are compiled for")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of the solver")
    options = parser.parse_args(argv)
    case = CASES[options.model]
    if options.batch is None and options.mesh not in case.batches:
        parser.error(f"`--batch` must be given for a mesh without a published one; got {options.mesh}.")
    variants = VARIANTS if options.windows is None else [(latencies, 4) for latencies in options.windows]
    model = case.make(
        batch=options.batch or case.batches[options.mesh], **(case.full if options.sizes == "full" else case.small)
    )
    mesh = MESHES[options.target](parse_mesh(options.mesh))
    hardware = diffshard.preset("h100", dict(mesh.shape))
    args = abstract_arguments(model)
    request, plan = searched(model, mesh, options.time_limit, executor="program")
    layout = layout_of(plan, request.space)
    rows = []
    for latencies, at_once in variants:
        with windows_of(latencies):
            played_s = play(request.space.program_steps(layout).steps).seconds
            compiled = plan.apply(model.step).lower(*args).compile(compiler_options={AT_ONCE: at_once})
        timeline = simulate(compiled.as_text() or "", mesh.shape, achievable_rates(hardware))
        waiting_s = sum(timeline.waited_s.values())
        peak = compiled.memory_analysis().peak_memory_in_bytes / 2**30
        times = (1e3 * s for s in (played_s, timeline.step_s, timeline.busy_s[COMPUTE], waiting_s))
        name = "no barriers" if math.isinf(latencies) else f"{latencies:g}"
        rows.append((name, at_once, *(f"{ms:.1f}" for ms in times), f"{peak:.2f}"))
        print(*rows[-1], sep="  ", flush=True)
    print_table(f"{options.model}, {options.mesh}; planned {plan.peak_bytes / 2**30:.2f} GiB", COLUMNS, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
