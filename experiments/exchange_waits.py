"""What codes in the exchanges of activations could save: the waits of compiled programs of a mixture of experts.

    python -m experiments.exchange_waits --mesh 4x8 [--links 1 0.25] [--time-limit 60]

The mixture of experts of `experiments.timeline_models` is planned with its numbers as they are, and compiled for H100s
(the extra `gpu-compile`), for links between hosts of some share of the preset's bandwidth; the program is played back.
Codes of 8 bits are half the bytes of bfloat16, so that in this plan they save at most half of the waits for all-to-alls
and permutes, whatever these move.
"""

import argparse
import dataclasses
from collections.abc import Sequence

import diffshard
from diffshard.checks.kernel_work import H100_HOST, achievable_rates
from diffshard.checks.timeline import Timeline, simulate
from diffshard.plans.formats import format_s
from experiments.formats import faster
from experiments.host_devices import parse_mesh
from experiments.models.model import abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES
from experiments.timeline_models import CASES

EXCHANGES = ("all_to_all", "collective_permute")


def waits_s(timeline: Timeline, kinds: Sequence[str]) -> float:
    """Returns the seconds that the compute stream waits for collectives of some kinds."""
    return sum(seconds for (kind, _), seconds in timeline.waited_s.items() if kind in kinds)


def table(mesh_text: str, sizes: str, links: Sequence[float], limit_s: float) -> None:
    """Plans and compiles the model for each bandwidth between hosts, and prints its waits."""
    case, rows = CASES["mixture of experts"], []
    model = case.make(batch=case.batches[mesh_text], **(case.full if sizes == "full" else case.small))
    mesh = MESHES["h100"](parse_mesh(mesh_text))
    preset = diffshard.preset("h100", dict(mesh.shape))
    for share in links:
        own = {axis: faster(link, share) if link.num_hosts > 1 else link for axis, link in preset.links.items()}
        hardware = dataclasses.replace(preset, links=own)
        network = share * H100_HOST.network_bytes_per_s
        rates = achievable_rates(hardware, host=dataclasses.replace(H100_HOST, network_bytes_per_s=network))
        step = diffshard.search(
            model.step, mesh, hardware=hardware, time_limit_s=limit_s, donate_argnums=0, progress="none"
        )
        plan = step.plan(*abstract_arguments(model))
        timeline = simulate(step.lower(*abstract_arguments(model)).compile().as_text() or "", mesh.shape, rates)
        exchanges_s = waits_s(timeline, EXCHANGES)
        seconds = [plan.step_s, timeline.step_s, sum(timeline.waited_s.values()), exchanges_s]
        rows.append([f"{share:g}", *map(format_s, seconds), f"{exchanges_s / 2 / timeline.step_s:.1%}"])
        print(*rows[-1], sep="  ", flush=True)
    columns = ["links between hosts", "predicted", "timeline", "waits", "for exchanges", "codes save at most"]
    print_table(f"mixture of experts on {mesh_text} H100s, compiled", columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="4x8")
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--links", type=float, nargs="+", default=[1.0, 0.25], help="shares of the preset's bandwidth")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of the solver for each plan")
    options = parser.parse_args(argv)
    table(options.mesh, options.sizes, options.links, options.time_limit)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
