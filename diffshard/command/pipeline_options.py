"""Options of `diffshard search` for clusters and for pipelines, and the values that they stand for."""

import argparse
import math
import re
from functools import partial
from typing import Any, get_args

from cost.base import Link
from cost.clusters import Cluster, Hosts
from cost.pipeline_schedules import Schedule
from diffshard.command.arguments import UsageError, arguments
from diffshard.pipelines.base import GradientReduction, Pipeline

_OF_PIPELINES = (
    "microbatches",
    "max_stages",
    "schedules",
    "predicted_steps",
    "stages_per_device",
    "gradient_reductions",
    "max_replicas",
    "batch",
)
"""Options that need `--pipeline`, as `argparse` names them."""


def add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    """Adds what a pipeline may be to the options of `diffshard search`."""
    group = parser.add_argument_group("pipelines", "a training step in stages, on --cluster or --devices")
    group.add_argument("--pipeline", action="store_true", help="cut the step into stages on parts of the devices")
    group.add_argument(
        "--microbatches",
        type=whole_numbers,
        metavar="M[,M...]",
        help="numbers of micro-batches to try; default: 4,8,16,32",
    )
    group.add_argument("--max-stages", type=whole_number_of, metavar="N", help="default: 8")
    group.add_argument(
        "--schedules",
        type=partial(names_of, Schedule),
        metavar="NAME[,NAME...]",
        help="some of 1f1b, eager, gpipe; default: all of these. Alone: 2bw, gradients of the step before. "
        "Also: interleaved, zb-h1, zb-v",
    )
    group.add_argument(
        "--predicted-steps", type=float, metavar="S", help="for 2bw: steps by which weights are predicted; default: 0"
    )
    group.add_argument(
        "--stages-per-device", type=whole_numbers, metavar="N[,N...]", help="for interleaved; default: 2"
    )
    group.add_argument(
        "--gradient-reductions",
        type=partial(names_of, GradientReduction),
        metavar="HOW[,HOW]",
        help="how often gradients are reduced: each_microbatch, once; default: each_microbatch",
    )
    group.add_argument(
        "--max-replicas",
        type=whole_number_of,
        metavar="N",
        help="above 1, each kind of device may be a replica with its own number of micro-batches; default: 1",
    )
    group.add_argument(
        "--batch", type=arguments, metavar="I[,I...]", help="arguments with the batch, by number or name; default: 1"
    )


def add_cluster_options(parser: argparse.ArgumentParser, shape: Any) -> None:
    """Adds `--cluster` to the options of which one says what the devices are, and `--between` to a parser."""
    shape.add_argument(
        "--cluster",
        type=cluster_hosts,
        metavar="NxNxHARDWARE[,...]",
        help="hosts of one kind or more, such as 2x8xa100,2x4xt4",
    )
    parser.add_argument(
        "--between",
        type=link,
        metavar="LATENCY_S,BYTES_PER_S",
        help="for --cluster: the link between hosts, for what one host sends, such as 10e-6,12.5e9",
    )


def cluster_hosts(text: str) -> tuple[Hosts, ...]:
    """Reads hosts, devices of each and their hardware, such as `2x8xa100,2x4xt4`."""
    groups = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)x(\d+)x([\w.-]+)\s*", part)
        if not match:
            raise argparse.ArgumentTypeError(f"{part!r} is not HOSTSxDEVICESxHARDWARE, as in 2x8xa100,2x4xt4")
        try:
            groups.append(Hosts(int(match[1]), int(match[2]), match[3]))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removesuffix(" Or give a `Hardware`.")) from None
    return tuple(groups)


def link(text: str) -> Link:
    """Reads a link as its latency in seconds and its bytes per second, such as `10e-6,12.5e9`."""
    try:
        latency_s, bytes_per_s = map(float, text.split(","))
    except ValueError:
        latency_s = bytes_per_s = math.nan
    if not (0 <= latency_s < math.inf and 0 < bytes_per_s < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not a latency and bytes per second, such as 10e-6,12.5e9")
    return Link(latency_s, 1 / bytes_per_s)


def whole_number_of(text: str) -> int:
    """Reads a whole number, 1 or more."""
    if not re.fullmatch(r"\s*\d{1,9}\s*", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def whole_numbers(text: str) -> tuple[int, ...]:
    """Reads whole numbers, such as `4,8,16`."""
    return tuple(whole_number_of(part) for part in text.split(","))


def names_of(kind: Any, text: str) -> tuple[str, ...]:
    """Reads names of a kind, such as `1f1b,eager` of `Schedule`."""
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in get_args(kind)]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(get_args(kind))}")
    return names


def cluster_of(options: argparse.Namespace) -> Cluster | None:
    """Returns the cluster of `--cluster`; None if it is not given."""
    if options.cluster is None:
        if options.between is not None:
            raise UsageError("--between is for --cluster")
        return None
    try:
        return Cluster(options.cluster, between=options.between)
    except ValueError as error:
        if "`Cluster.between` must be given" not in str(error):
            raise UsageError(f"--cluster: {error}") from None
        raise UsageError(
            "--between LATENCY_S,BYTES_PER_S must be given: the hosts of --cluster have different networks, so that "
            "the link between them does not follow from these"
        ) from None


def pipeline_of(options: argparse.Namespace) -> Pipeline | None:
    """Returns the `Pipeline` that the search may choose from; None without `--pipeline`."""
    given = [name for name in _OF_PIPELINES if getattr(options, name) is not None]
    if not options.pipeline:
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} is for --pipeline")
        return None
    if options.mesh is not None:
        raise UsageError(
            "--pipeline divides devices into meshes itself: give --cluster or --devices in place of --mesh"
        )
    values = {name: getattr(options, name) for name in given if name != "batch"}
    if options.batch is not None:
        values["batch_argnums"] = tuple(argument for argument in options.batch if isinstance(argument, int))
        values["batch_argnames"] = tuple(argument for argument in options.batch if isinstance(argument, str))
    return Pipeline(**values)
