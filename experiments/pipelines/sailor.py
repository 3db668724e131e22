"""Predicted beside measured seconds of 24 training steps of OPT-350 on GH200s and on unequal older GPUs.

    python -m experiments.pipelines.sailor

A prediction adds up the profile of each layer, simulates 1F1B for every pipeline of a plan, takes the slowest, and adds
the reduction of gradients over the link between hosts and the update of the weights. What is not in the profiles is how
transfers between stages run. Six ways are tried for each cluster, `TRANSFERS`, and the one with the least mean error on
the plans with up to `MOST_TUNED_HOSTS` hosts is taken for all; plans with more hosts are held out.

Source: Strati et al., "Sailor" (2025); plans, profiles and measured seconds from github.com/eth-easl/sailor,
sailor/Planner/simulations, rates of links from sailor/providers.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cost.pipeline_schedules import graph_of
from cost.pipeline_times import StageTimes, simulate
from experiments.pipelines.device_placement import DATA
from experiments.tables import print_table

SAILOR = DATA / "sailor"
LAYER_BYTES = 4 * np.array([53_608_448] + [12_596_224] * 24 + [51_513_344])
"""Float32 weights of each layer of OPT-350: embedding, 24 blocks, head."""
RESULT_BYTES = 4 * 2048 * 1024
"""What a layer sends for each sample: 2048 tokens of width 1024 in float32."""
DUPLICATE = "mit/N3_D1"
"""The measured numbers of this plan are those of mit/N6_D2, reduction of gradients included, though it has no replicas
to reduce over. It is predicted, and counts in no statistic."""


class Link(NamedTuple):
    """The link between hosts of a cluster.

    Attributes:
      bytes_per_s: one way.
      for_each_device: whether each GPU has its own, as GH200s do; else the GPUs of a host share one.
    """

    bytes_per_s: float
    for_each_device: bool


LINKS = {"clariden": Link(22.9e9, True), "mit": Link(117.5e6, False)}
"""Rates of large messages that the authors measured: Slingshot at 200 Gbit/s, and Ethernet at 1 Gbit/s."""

Transfer = tuple[str, bool]
TRANSFERS: tuple[Transfer, ...] = tuple(
    (waiting, is_whole) for waiting in ("neither", "receiver", "both") for is_whole in (False, True)
)
"""Which stages wait while a tensor is sent, and whether every GPU of a stage sends all of it or its part."""
ASYNCHRONOUS: Transfer = ("neither", False)
MOST_TUNED_HOSTS = {"clariden": 4, "mit": 4}


class Plan(NamedTuple):
    """A plan that was run.

    Attributes:
      name: cluster, hosts, replicas.
      cluster: "clariden" or "mit".
      num_hosts: as in the name.
      num_microbatches: of each pipeline.
      microbatch_size: samples.
      layers: for each stage.
      devices: for each stage and replica the kind of GPU and how many split each layer.
      measured_s: seconds of a step.
    """

    name: str
    cluster: str
    num_hosts: int
    num_microbatches: int
    microbatch_size: int
    layers: list[list[int]]
    devices: list[list[tuple[str, int]]]
    measured_s: float


Profiles = dict[str, dict[str, dict[str, dict[str, list[float]]]]]
"""Forward, backward and update seconds by GPU, micro-batch size, tensor parallelism and layer."""


def read_plans(folder: Path) -> list[Plan]:
    """Reads all plans, by cluster, hosts and replicas."""
    plans = []
    for path in folder.rglob("plan_config*.json"):
        data = json.loads(path.read_text())
        pipeline = data["pipeline_list"][0]
        cluster = "mit" if "mit" in path.relative_to(folder).parts else "clariden"
        plans.append(
            Plan(
                name=f"{cluster}/{path.stem.removeprefix('plan_config_')}",
                cluster=cluster,
                num_hosts=data["N"],
                num_microbatches=data["gbs"] // (data["mbs"] * pipeline["dp"][0]),
                microbatch_size=data["mbs"],
                layers=pipeline["layers_per_stage"],
                devices=[[(hosts[0][0], tp) for hosts, tp in stage] for stage in pipeline["tmp_per_stage"]],
                measured_s=data["real"],
            )
        )
    return sorted(plans, key=lambda plan: (plan.cluster, plan.num_hosts, plan.name))


def read_profiles(folder: Path) -> Profiles:
    """Reads the profiles of all GPUs."""
    return {path.stem.split("_")[-1]: json.loads(path.read_text()) for path in folder.glob("profile_*.json")}


def predicted_s(plan: Plan, profiles: Profiles, transfer: Transfer) -> float:
    """Returns the seconds of a step of a plan, with one of `TRANSFERS`."""
    link = LINKS[plan.cluster]
    num_stages, num_replicas = len(plan.layers), len(plan.devices[0])
    graph = graph_of("1f1b", num_stages, plan.num_microbatches)
    pipelines_s = []
    update_s = 0.0
    for replica in range(num_replicas):
        devices = [stage[replica] for stage in plan.devices]
        seconds = np.array(
            [_stage_s(plan, profiles, layers, *on) for layers, on in zip(plan.layers, devices, strict=True)]
        )
        sends_s = [_send_s(plan, link, on[1], transfer[1]) for on in devices[:-1]]
        pipelines_s.append(simulate(_stage_times(seconds, np.array(sends_s), transfer[0]), graph).step_s)
        update_s = max(update_s, float(seconds[:, 2].max()))
    return max(pipelines_s) + update_s + _reduction_s(plan, link)


def _stage_s(plan: Plan, profiles: Profiles, layers: list[int], gpu: str, num_split: int) -> np.ndarray:
    """Returns forward, backward and update seconds of a stage.

    The profiles with one sample are slower than those with two where starting kernels takes longer than they do. A
    micro-batch of one sample never takes longer than one of two.
    """

    def of(size: int) -> np.ndarray:
        profile = profiles[gpu][str(size)][str(num_split)]
        return np.sum([profile[str(layer)] for layer in layers], axis=0)

    size = plan.microbatch_size
    return np.minimum(of(1), of(2)) if size == 1 else of(size)


def _send_s(plan: Plan, link: Link, num_split: int, is_whole: bool) -> float:
    """Returns the seconds of sending a micro-batch's results to the next stage, or gradients back."""
    num_bytes = RESULT_BYTES * plan.microbatch_size * (num_split if is_whole else 1)
    return num_bytes / (link.bytes_per_s * (num_split if link.for_each_device else 1))


def _stage_times(seconds: np.ndarray, sends_s: np.ndarray, waiting: str) -> StageTimes:
    """Returns the times for the simulator: a stage that waits for a transfer does nothing else meanwhile."""
    forward, backward = seconds[:, 0].copy(), seconds[:, 1].copy()
    if waiting == "neither":
        return StageTimes(forward, backward, sends_s, sends_s)
    forward[1:] += sends_s
    backward[:-1] += sends_s
    if waiting == "both":
        forward[:-1] += sends_s
        backward[1:] += sends_s
    nothing = np.zeros_like(sends_s)
    return StageTimes(forward, backward, nothing, nothing)


def _reduction_s(plan: Plan, link: Link) -> float:
    """Returns the seconds of a ring that sums the gradients of the largest stage."""
    seconds = []
    for layers, replicas in zip(plan.layers, plan.devices, strict=True):
        rate = link.bytes_per_s * (replicas[0][1] if link.for_each_device else 1)
        seconds.append(2 * (len(replicas) - 1) / len(replicas) * LAYER_BYTES[layers].sum() / rate)
    return float(max(seconds))


def tuned_transfer(plans: Sequence[Plan], profiles: Profiles) -> Transfer:
    """Returns the one of `TRANSFERS` with the least mean absolute relative error on plans of one cluster."""
    return min(
        TRANSFERS,
        key=lambda way: np.mean([abs(predicted_s(plan, profiles, way) / plan.measured_s - 1) for plan in plans]),
    )


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns how far two lists agree on the order of all pairs, from -1 to 1; ties count as half."""
    a, b = (np.sign(np.subtract.outer(x, x))[np.triu_indices(len(x), 1)] for x in (np.array(first), np.array(second)))
    return float((a * b).mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the plans and the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    if not SAILOR.exists():
        print(f"Skipped: there is no {SAILOR}.")
        return
    plans, profiles = read_plans(SAILOR), read_profiles(SAILOR)
    rows, results = [], []
    for cluster in LINKS:
        of_cluster = [plan for plan in plans if plan.cluster == cluster]
        tuned = [p for p in of_cluster if p.num_hosts <= MOST_TUNED_HOSTS[cluster] and p.name != DUPLICATE]
        way = tuned_transfer(tuned, profiles)
        print(f"{cluster}: waiting {way[0]}, every GPU sends {'all' if way[1] else 'its part'}")
        for plan in of_cluster:
            use = "duplicate" if plan.name == DUPLICATE else "tuned" if plan in tuned else "held out"
            without_s = predicted_s(plan, profiles, ASYNCHRONOUS)
            seconds = predicted_s(plan, profiles, way)
            error = seconds / plan.measured_s - 1
            results.append((cluster, use, seconds, plan.measured_s, error))
            shape = f"{len(plan.layers)} x {len(plan.devices[0])} x {plan.devices[0][0][1]}"
            cells = (
                f"{plan.measured_s:.3f}",
                f"{seconds:.3f}",
                f"{error:+.1%}",
                f"{without_s / plan.measured_s - 1:+.1%}",
            )
            rows.append((plan.name, shape, plan.num_microbatches, plan.microbatch_size, *cells, use))
    columns = (
        "plan",
        "stages x replicas x split",
        "M",
        "samples",
        "measured s",
        "predicted s",
        "error",
        "async",
        "use",
    )
    print_table("Seconds of a step; async: the error if transfers ran beside computing", columns, rows)
    groups = {
        "tuned": lambda r: r[1] == "tuned",
        "held out": lambda r: r[1] == "held out",
        "clariden": lambda r: r[0] == "clariden",
        "mit": lambda r: r[0] == "mit" and r[1] != "duplicate",
        "all": lambda r: r[1] != "duplicate",
    }
    table = []
    for name, belongs in groups.items():
        chosen = [result for result in results if belongs(result)]
        errors = np.array([result[4] for result in chosen])
        tau = kendall_tau([result[2] for result in chosen], [result[3] for result in chosen])
        sizes = (f"{np.abs(errors).mean():.1%}", f"{np.median(np.abs(errors)):.1%}", f"{np.abs(errors).max():.1%}")
        table.append((name, len(chosen), *sizes, f"{errors.mean():+.1%}", f"{tau:.3f}"))
    print_table("Errors", ("plans", "number", "mean", "median", "largest", "signed mean", "Kendall's tau"), table)


if __name__ == "__main__":
    main()
