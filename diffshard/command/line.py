"""The command `diffshard`: search a plan, show or compare plans, measure devices, solve an instance of the contest.

Results go to stdout and to files, progress and errors to stderr. Exit codes: 0, also for the best result until Ctrl-C;
1 if there is no feasible result or the work failed; 2 for usage; 130 if Ctrl-C came before there was a result.
"""

import argparse
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from cost.base import Hardware
from cost.presets import PRESET_NAMES
from diffshard.base import InfeasibleError, PlanError, printable
from diffshard.checks.targets import TARGETS
from diffshard.command.arguments import (
    FailedError,
    UsageError,
    arguments,
    axis_rules,
    check_writable,
    checks,
    mesh_axes,
    num_bytes,
    positive_seconds,
    with_options,
    writing,
)
from diffshard.command.pipeline_options import add_cluster_options, add_pipeline_options
from diffshard.command.plan_commands import compare_plans, diff_plans, search_plan, show_plan
from diffshard.command.solve_command import solve_instance
from diffshard.hardware import calibrate, save_hardware
from diffshard.plans.base import Executor
from diffshard.plans.printing import TEXT_WIDTH, format_bytes, format_s, format_table
from diffshard.sharding_search.options import Remat, State
from diffshard.solving.solve import solver_names

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command with these words (None: those of the process) and returns its exit code."""
    options = _parser().parse_args(words)
    try:
        return options.run(options)
    except UsageError as error:
        print(f"diffshard {options.command}: {printable(with_options(str(error)))}", file=sys.stderr)
        return 2
    except (FailedError, InfeasibleError, PlanError) as error:
        print(f"diffshard {options.command}: {printable(with_options(str(error)))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"diffshard {options.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `diffshard show plan.json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diffshard", description="Automatic parallelisation for JAX.", formatter_class=_help_formatter
    )
    version = f"diffshard {metadata.version('diffshard')}, jax {metadata.version('jax')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_search(commands)
    _add_show(commands)
    _add_diff(commands)
    _add_compare(commands)
    _add_calibrate(commands)
    _add_solve(commands)
    return parser


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, width=min(shutil.get_terminal_size().columns, TEXT_WIDTH))


def _add_search(commands: Any) -> None:
    parser = commands.add_parser(
        "search",
        help="find how to run a function on a mesh; no devices are needed",
        usage="diffshard search MODULE:FUNCTION --args MODULE:FUNCTION --mesh AXIS=N --hardware NAME [...]",
        formatter_class=_help_formatter,
    )
    _add_function(parser)
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--mesh", type=mesh_axes, metavar="AXIS=N[,AXIS=N...]", help="slowest axis first")
    shape.add_argument("--devices", type=int, metavar="N", help="how many, where the mesh's shape shall be found, too")
    add_cluster_options(parser, shape)
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"{', '.join(PRESET_NAMES)}, or a file of `calibrate`, such as hardware.json; needed but for --cluster, "
        "which names it",
    )
    parser.add_argument("--memory-limit", type=num_bytes, metavar="SIZE", help="of a device, such as 80GiB")
    parser.add_argument(
        "--remat",
        choices=get_args(Remat),
        help="search also chooses what the backward pass computes again; offload also what waits in the host's memory",
    )
    parser.add_argument(
        "--state", choices=get_args(State), help="offload also lets state that only its update reads wait on the host"
    )
    parser.add_argument(
        "--donate", type=arguments, default=(), metavar="I[,I...]", help="arguments whose memory may be reused"
    )
    parser.add_argument(
        "--static",
        type=arguments,
        default=(),
        metavar="I[,I...]",
        help="arguments that are compile-time constants, by number or name",
    )
    parser.add_argument(
        "--in-shardings",
        metavar="MODULE:NAME",
        help="shardings of arguments to keep: a value, or a function that returns it",
    )
    parser.add_argument(
        "--logical-axis-rules",
        type=axis_rules,
        metavar="NAME=AXIS[+AXIS...][,...]",
        help="keep flax's partitioning metadata by these rules; '' for names of mesh axes only",
    )
    parser.add_argument("--executor", choices=get_args(Executor), help="how the function runs; default: the best one")
    parser.add_argument(
        "--check",
        type=checks,
        metavar="CHECK[,CHECK]",
        help="shardy or compile: let a compiler judge the plan, compile also tries baselines' plans; "
        "numbers: run the plan once on host devices, and hold the results against another run",
    )
    parser.add_argument(
        "--target", choices=TARGETS, help="for --check compile: what to compile for; default: the hardware"
    )
    parser.add_argument("--cache", metavar="FOLDER", help="keep plans there, and take those that were searched before")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the plan as a page")
    _add_solver_options(parser)
    add_pipeline_options(parser)
    parser.set_defaults(run=search_plan)


def _add_function(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="the function: a whole training step, say")
    parser.add_argument(
        "--args",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a function without parameters that returns its arguments",
    )


def _add_diff(commands: Any) -> None:
    parser = commands.add_parser(
        "diff", help="print what differs between two plans that were saved", formatter_class=_help_formatter
    )
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument("other", metavar="OTHER.json")
    parser.set_defaults(run=diff_plans)


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="compile saved plans of a function, and compare predictions with what XLA makes of them",
        usage="diffshard compare MODULE:FUNCTION --args MODULE:FUNCTION [...] PLAN.json [PLAN.json ...]",
        formatter_class=_help_formatter,
    )
    _add_function(parser)
    parser.add_argument("plans", nargs="+", metavar="PLAN.json", help="of one mesh; named by their files")
    parser.add_argument("--target", choices=TARGETS, help="what to compile for; default: the hardware of the plans")
    parser.set_defaults(run=compare_plans)


def _add_show(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="print a plan that was saved, of `search`, a pipeline or `bilevel`",
        formatter_class=_help_formatter,
    )
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument("--html", metavar="FILE", help="write it as a page instead")
    parser.set_defaults(run=show_plan)


def _add_calibrate(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure the devices that are here, for `search --hardware FILE`",
        formatter_class=_help_formatter,
    )
    parser.add_argument(
        "--mesh", type=mesh_axes, required=True, metavar="AXIS=N[,AXIS=N...]", help="whose links are measured"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write what was measured as JSON")
    parser.add_argument("--name", metavar="NAME", help="of the hardware, in plans")
    parser.add_argument(
        "--dtypes",
        type=lambda text: tuple(text.split(",")),
        default=("float32", "bfloat16"),
        metavar="TYPE[,TYPE...]",
        help="of the products that are timed",
    )
    parser.add_argument("--matrix-size", type=int, metavar="N", help="rows and columns of these; default: 2048")
    parser.add_argument("--largest", type=num_bytes, metavar="SIZE", help="the largest array moved; default: 64MiB")
    parser.add_argument("--repeats", type=int, metavar="N", help="each time is the median of this many; default: 7")
    parser.set_defaults(run=measure_hardware)


def _add_solve(commands: Any) -> None:
    parser = commands.add_parser(
        "solve", help="solve an instance in the format of the IOPDDL contest", formatter_class=_help_formatter
    )
    parser.add_argument("instance", metavar="INSTANCE.json[.gz]")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the solution there instead of stdout")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw cost and bound over time (.png, .svg, .pdf); needs matplotlib"
    )
    _add_solver_options(parser)
    parser.set_defaults(run=solve_instance)


def _add_solver_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--time-limit", type=positive_seconds, metavar="SECONDS", help="for the solver")
    parser.add_argument("--solver", metavar="NAME", help=f"{', '.join(solver_names())}")
    parser.add_argument("--seed", type=int, default=0, metavar="N")


if __name__ == "__main__":
    sys.exit(main())


def measure_hardware(options: argparse.Namespace) -> int:
    """Measures the devices of a mesh, prints what they reach, writes it to `--output`, and returns the exit code."""
    check_writable("--output", options.output)
    sizes, devices = tuple(options.mesh.values()), jax.devices()
    if len(devices) < math.prod(sizes):
        raise UsageError(
            f"--mesh has {math.prod(sizes)} devices, and there are {len(devices)}: {devices[0].device_kind}. Name axes "
            "with the sizes of this machine"
        )
    grid = np.array(devices[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(grid, tuple(options.mesh), axis_types=(AxisType.Auto,) * grid.ndim)
    given = {"matrix_size": options.matrix_size, "largest_bytes": options.largest, "repeats": options.repeats}
    try:
        hardware = calibrate(mesh, dtypes=options.dtypes, **{k: int(v) for k, v in given.items() if v is not None})
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    hardware = hardware if options.name is None else replace(hardware, name=options.name)
    print(_text(hardware, options.mesh), flush=True)
    if options.output:
        with writing("--output", options.output):
            save_hardware(hardware, options.output)
    return 0


def _text(hardware: Hardware, axes: dict[str, int]) -> str:
    """Returns the measurements as a table."""
    rates = hardware.flops_per_s if isinstance(hardware.flops_per_s, dict) else {}
    rows = [("products", dtype, f"{rate / 1e12:.3g} TFLOP/s") for dtype, rate in rates.items()]
    rows.append(("memory", format_bytes(hardware.memory_bytes), f"{hardware.memory_bytes_per_s / 1e9:.3g} GB/s"))
    for axis, size in axes.items():
        link = hardware.link(axis)
        bandwidth = f"{1e-9 / link.s_per_byte:.3g} GB/s" if link.s_per_byte else "as fast for any size"
        measured = f"{bandwidth}, latency {format_s(link.latency_s)}" if size > 1 else "one device"
        rows.append(("links", f"{axis} {size}", measured))
    return "\n".join([hardware.name, "", *format_table(rows, "  ")])
