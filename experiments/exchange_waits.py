"""What codes in the exchanges of activations save: compiled programs of a mixture of experts, and their waits.

    python -m experiments.exchange_waits --mesh 4x8 [--links 1 0.25] [--inside 0.14] [--formats int8] [--time-limit 60]

The mixture of experts of `experiments.timeline_models` is planned with its numbers as they are, and with exchanges of
activations free to be in each format wherever that gains, whatever the loss says; and the first plan with all exchanges
that can be in it, also where that gains nothing. All are compiled for H100s (the extra `gpu-compile`), for links
between hosts, and inside of them, of some share of the preset's bandwidth; the programs are played back.
Codes of 8 bits are half the bytes of bfloat16, so that in the first plan they save at most half of the waits for
all-to-alls and permutes, whatever these move. `experiments.codes --kinds exchanges` trains a small one.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import diffshard
from diffshard.checks.kernel_work import H100_HOST, AchievableRates, achievable_rates
from diffshard.checks.timeline import Timeline, simulate
from diffshard.plans.printing import format_s
from diffshard.sharding_search.layout import layout_of
from diffshard.sharding_search.number_formats import all_groups
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from experiments.formats import faster
from experiments.host_devices import parse_mesh
from experiments.models.model import abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES
from experiments.timeline_models import CASES
from search_spaces.sharding.base import Coded
from search_spaces.sharding.coded_exchanges import with_used_exchanges
from search_spaces.sharding.codes import CODES
from search_spaces.sharding.space import ShardingSpace

KINDS = ("all_to_all", "collective_permute")


def space_for(
    fn: Callable[..., Any], arguments: Sequence[Any], mesh: Any, hardware: diffshard.Hardware
) -> ShardingSpace:
    """Returns the space of a step that donates its state."""
    options = Options(fn=fn, mesh=mesh, hardware=hardware, memory_limit_bytes=float("inf"), donate_argnums=(0,))
    return space_of(options, trace_function(options, arguments))


def at_any_loss(space: ShardingSpace, name: str) -> diffshard.formats.Formats:
    """Returns formats with which exchanges may be in one, whatever that does to the loss."""
    formats = diffshard.formats.Formats(1.0, increases={}, products=(), exchanges=(name,))
    return dataclasses.replace(formats, increases={group.name: 0.0 for group in all_groups(space, formats)})


def all_coded(space: ShardingSpace, plan: diffshard.Plan, name: str) -> diffshard.Plan:
    """Returns a plan in which all exchanges that can be are codes of a format, whatever they gain."""
    keys = [Coded(vertex.index, name, "exchange") for vertex in space.exchangeable]
    layout = layout_of(plan, space).with_formats(keys)
    layout = with_used_exchanges(space.reshard_costs.path, space.graph, layout)
    pairs = zip(plan.operations, layout.strategies, strict=True)
    operations = [dataclasses.replace(o, exchanged_in=strategy.exchanged_in) for o, strategy in pairs]
    return dataclasses.replace(plan, operations=tuple(operations))


def waits_s(timeline: Timeline, kinds: Sequence[str]) -> float:
    """Returns the seconds that the compute stream waits for collectives of some kinds."""
    return sum(seconds for (kind, _), seconds in timeline.waited_s.items() if kind in kinds)


def rates_with(preset: diffshard.Hardware, between: float, inside: float) -> tuple[diffshard.Hardware, AchievableRates]:
    """Returns prices and rates of H100s whose links between hosts and inside of them have a share of the bandwidth."""
    links = {axis: faster(link, between if link.num_hosts > 1 else inside) for axis, link in preset.links.items()}
    hardware = dataclasses.replace(preset, links=links)
    host = dataclasses.replace(
        H100_HOST,
        device_bytes_per_s=inside * H100_HOST.device_bytes_per_s,
        network_bytes_per_s=between * H100_HOST.network_bytes_per_s,
    )
    return hardware, achievable_rates(hardware, host=host)


def plans_of(
    fn: Callable[..., Any], arguments: Sequence[Any], mesh: Any, hardware: diffshard.Hardware,
    formats: Sequence[str], limit_s: float,
) -> dict[str, diffshard.Plan]:  # fmt: skip
    """Returns by label the plans with exact exchanges, with those that gain in each format, and with all in it."""
    common = {"hardware": hardware, "donate_argnums": 0, "progress": "none", "time_limit_s": limit_s}
    plans = {"exact": diffshard.search(fn, mesh, **common).plan(*arguments)}
    space = space_for(fn, arguments, mesh, hardware)
    for name in formats:
        free = diffshard.search(fn, mesh, formats=at_any_loss(space, name), **common)
        plans[f"{name} where it gains"] = free.plan(*arguments)
        plans[f"all in {name}"] = all_coded(space, plans["exact"], name)
    return plans


def table(
    mesh_text: str, sizes: str, links: Sequence[float], inside: float, formats: Sequence[str], limit_s: float
) -> None:
    """Plans and compiles the model for each bandwidth between hosts and each format, and prints its waits."""
    case, rows = CASES["mixture of experts"], []
    model = case.make(batch=case.batches[mesh_text], **(case.full if sizes == "full" else case.small))
    mesh, arguments = MESHES["h100"](parse_mesh(mesh_text)), abstract_arguments(model)
    for share in links:
        hardware, rates = rates_with(diffshard.preset("h100", dict(mesh.shape)), share, inside)
        for label, plan in plans_of(model.step, arguments, mesh, hardware, formats, limit_s).items():
            hlo = plan.apply(model.step).lower(*arguments).compile().as_text() or ""
            timeline = simulate(hlo, mesh.shape, rates)
            exchanges_s = waits_s(timeline, KINDS)
            seconds = [timeline.step_s, sum(timeline.waited_s.values()), exchanges_s]
            num_coded = sum(bool(operation.exchanged_in) for operation in plan.operations)
            predicted = [] if label.startswith("all") else [plan.step_s, plan.lower_bound_s]
            texts = [*map(format_s, predicted), "", ""][:2]
            most = f"{exchanges_s / 2 / timeline.step_s:.1%}" if label == "exact" else ""
            rows.append([f"{share:g}", label, *texts, *map(format_s, seconds), most, f"{num_coded}"])
            print(*rows[-1], *timeline.notes, sep="  ", flush=True)
    columns = [
        "links between hosts", "exchanges in", "predicted", "bound", "timeline", "waits", "for exchanges",
        "codes save at most", "as codes",
    ]  # fmt: skip
    print_table(f"mixture of experts on {mesh_text} H100s, compiled", columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="4x8")
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--links", type=float, nargs="+", default=[1.0, 0.25], help="shares of the preset's bandwidth")
    parser.add_argument(
        "--inside", type=float, default=1.0, help="the same share inside of hosts; 0.14 is about PCIe 5.0"
    )
    parser.add_argument("--formats", nargs="*", choices=CODES, default=["int8"], help="of exchanges")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of the solver for each plan")
    options = parser.parse_args(argv)
    links = options.links, options.inside
    table(options.mesh, options.sizes, *links, options.formats, options.time_limit)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
