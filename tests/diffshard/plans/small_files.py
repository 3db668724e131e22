"""A small record of each kind that has files, with everything that a file may hold."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh

import diffshard
from cost.base import Link
from cost.lines import Line
from cost.presets import preset
from diffshard.budgets.base import PhasePlans
from diffshard.plans.base import PlannedObjective, PredictedCollective, TriedShape
from diffshard.plans.comparison import ComparedPlan, Comparison
from diffshard.plans.sections import (
    Advice,
    FormatGroup,
    FormatTrial,
    PlannedFormats,
    Rematerialisation,
    Residual,
    WholeWork,
)
from diffshard.plans.timeline import Lane, LaneBar
from diffshard.resharding import Move
from diffshard.tables.hot_rows import RowOrder
from diffshard.tables.learned_cost import LearnedPrediction
from search_spaces.embedding_tables.base import DEVICE, EVERY_DEVICE, HOST, EmbeddingTable, Piece, TableDevices
from tests.diffshard.bilevel_search.plans.small_bilevel_plan import validated_plan
from tests.diffshard.pipelines.small_pipeline_plan import small_pipeline_plan
from tests.diffshard.plans.small_plan import small_plan


def full_plan() -> diffshard.Plan:
    """The small plan with every field that plans may have but a timeline."""
    plan = small_plan()
    groups = FormatGroup("layer_*/dense", 4, 2, 6e-4, 2e-3), FormatGroup("head", 1, 0, 5e-4, 1e-3, "int8", "sum")
    trials = FormatTrial("float8", 8e-3, 2, 7e-4, 8e-4, 2e-4), FormatTrial("none", 10e-3, 0, 0.0, 0.0)
    lanes = (Lane("compute", 5e-3, (LaneBar("layer_0", "forward", 0.0, 5e-3, 2),)),)
    compared = ComparedPlan("the plan", "program", 10e-3, 11e-3, 5e-3, 512.0, 600.0, 1024.0, 1100.0, True, (), lanes)
    residual = Residual("layer_*/dense", "net.py:7", "recomputed", 2, 512.0, 1e-3)
    links = {axis: Link(1e-6, 1e-6, {"all_to_all": (Line(1e-6, 4e-6),)}) for axis in plan.mesh_axes}
    last = PredictedCollective("all_gather", "model", 2048.0, 1.0, 1e-3, 7, 2e-3, 4, 0)
    return dataclasses.replace(
        plan,
        hardware=dataclasses.replace(plan.hardware, flops_per_s={"float32": 1e9}, links=links),
        collectives=(*plan.collectives[:-1], last),
        operations=(
            *plan.operations[:-1],
            dataclasses.replace(plan.operations[-1], reductions=((("all_reduce", "data"),),)),
        ),
        comparison=Comparison("train_step", plan.mesh_axes, "H100", (compared,), ("a note",)),
        remat=Rematerialisation((3,), (residual,), 1e-3, 256.0, ((4, 5, 6),), 128.0),
        shapes=(
            TriedShape({"data": 2, "model": 4}, 10e-3, 9e-3, 1.0, "finished"),
            TriedShape({"data": 8}, None, 9.5e-3, 0.1, "cut off"),
        ),
        parameters=("state", "batch", "options"),
        static_argnums=(2,),
        donate_argnums=(0,),
        static_argnames=("mode",),
        donate_argnames=("other",),
        logical_axis_rules=(("embed", ("model",)),),
        objective=PlannedObjective("energy_j", 12.5, 12.0),
        formats=PlannedFormats(1e-3, 7e-4, groups, 8e-4, "a batch", trials),
        whole_work=(WholeWork("dot_general (net.py:7)", (3,), 1.5e-3, True, 31, 32, ("data",), ("batch",), 0),),
        advice=(Advice("1.00 ms less: donate `state`", 1e-3), Advice("512 B less", 0.0, 512.0)),
    )


def table_plan() -> diffshard.tables.TablePlan:
    """Two tables on two devices: a piece in memory of a host, copied rows, and columns in parts."""
    tables = (
        EmbeddingTable("users", 100, 8, 2.0, access=(3.0, 1.0)),
        EmbeddingTable("items", 50, 16, 1.0, "bfloat16", "mean"),
    )
    hardware = preset("h100", {"model": 2})
    devices = TableDevices((hardware,) * 2, (1e6, 2e6), 1e-9, 64, (1e6, 1e6))
    pieces = (
        Piece(0, EVERY_DEVICE, 0, 10, 0, 8, DEVICE), Piece(0, 1, 10, 100, 0, 8, HOST),
        Piece(1, 0, 0, 50, 0, 8, DEVICE), Piece(1, 1, 0, 50, 8, 16, DEVICE),
    )  # fmt: skip
    learned = LearnedPrediction("2 measured devices", (1e-3, 2e-3), (3e-3, 1e-3))
    mesh = AbstractMesh((2,), ("model",))
    orders = (RowOrder(0, (99, 3, 50)),)
    return diffshard.tables.TablePlan(
        tables, devices, pieces, (("model", 2),), 0.0, "finished", 0.5, learned, orders=orders, mesh=mesh
    )


def group_plan() -> diffshard.experts.GroupPlan:
    """Three workers in two groups, which hold four experts each."""
    return diffshard.experts.GroupPlan(
        groups=((0, 2), (1,)),
        expert_workers=((0, 0, 2, 2), (1, 1, 1, 1)),
        computing_s=(2.0, 3.0),
        exchanging_s=(1.0, 0.0),
        all_reduce_s=0.5,
        merging_s=4.0,
        lower_bound_s=3.0,
        status="finished",
        search_s=0.1,
    )


def assignment() -> diffshard.experts.ExpertAssignment:
    """Eight experts on four workers."""
    return diffshard.experts.assign_experts([3, 3, 3, 2, 2, 3, 2, 3], [42, 56, 68, 22], [1, 5, 1, 3])


def placement() -> diffshard.pipelines.Placement:
    """Six layers on three devices."""
    return diffshard.pipelines.place([3, 3, 3, 2, 4, 4], [[0, 2, 4], [2, 0, 3], [4, 3, 0]])


def budget() -> diffshard.elastic.Budget:
    """Two phases of different devices, with the small plan in each."""
    plan = small_plan()
    mesh = AbstractMesh((2, 4), ("data", "model"))
    phases = tuple(
        diffshard.elastic.Phase(mesh=mesh, num_steps=n, hardware="h100", device_ids=tuple(range(8))) for n in (3, 5)
    )
    plans = PhasePlans((plan, plan), (Move(1e-3, 2048.0, 2),), (3.0, 5.0))
    return diffshard.elastic.Budget(phases, plans, plans, 9e-3, "finished", 0.5)


RECORDS: dict[str, Callable[[], Any]] = {
    "plan": full_plan,
    "pipeline": small_pipeline_plan,
    "bilevel": functools.partial(validated_plan),
    "tables": table_plan,
    "groups": group_plan,
    "assignment": assignment,
    "placement": placement,
    "budget": budget,
}
"""What makes a record of each kind; its class has `save` and `load`."""


def shown(record: Any) -> str:
    """Returns everything that is shown of a record."""
    return f"{record}{record.html() if hasattr(record, 'html') else ''}"
