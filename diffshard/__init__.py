"""Automatic parallelisation for JAX: `search(fn, mesh)` finds how a function runs on a mesh, and runs it so.

Public names are imported when they are first used, so that `import diffshard` costs next to nothing. What users need of
the packages `cost` and `search_spaces` is here, too.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; when the program runs, `__getattr__` reads `_NAMES_OF` below
    from cost.base import Hardware, Link, Problem
    from cost.clusters import Cluster
    from cost.host_groups import Hosts, Submesh
    from cost.lines import Line
    from cost.presets import PRESET_NAMES, preset
    from cost.quantities import LiveMemory, Quantity
    from diffshard import nnx
    from diffshard.base import InfeasibleError, NumbersError, PlanError, ProcessesError, Proposal, Solution, Solver
    from diffshard.bilevel_search.estimators.curvature import curvature
    from diffshard.bilevel_search.estimators.mixture import mixture
    from diffshard.bilevel_search.estimators.sampled import sampled
    from diffshard.bilevel_search.plans.pareto import Pareto, pareto
    from diffshard.bilevel_search.plans.plan import BilevelPlan
    from diffshard.bilevel_search.proving import CandidatesData
    from diffshard.bilevel_search.search import BilevelSearch, bilevel
    from diffshard.budgets.base import Budget, Phase
    from diffshard.budgets.budget import budget
    from diffshard.budgets.logs import phases_of_log
    from diffshard.calibration import calibrate
    from diffshard.comparison.compare import compare
    from diffshard.elastic.manifests import CheckpointError
    from diffshard.elastic.resume import resume
    from diffshard.elastic.training import Training
    from diffshard.embedding_tables.learned_cost import LearnedTableCost
    from diffshard.embedding_tables.learning import host_table_cost, learn_table_cost
    from diffshard.embedding_tables.plan import TablePlan
    from diffshard.embedding_tables.reference import padded_ids
    from diffshard.embedding_tables.search import shard_tables
    from diffshard.expert_groups.assignment import assign_experts
    from diffshard.expert_groups.grouping import group_experts, reassign_experts
    from diffshard.expert_groups.layer_program import RoutedTokens
    from diffshard.expert_groups.layout import ExpertLayout
    from diffshard.expert_groups.loads import ExpertLoads
    from diffshard.expert_groups.plans import ExpertAssignment, GroupPlan
    from diffshard.experts.plans import ExpertPlans, expert_plans
    from diffshard.hardware_file import load_hardware, save_hardware
    from diffshard.initialisation import init_search, kaiming, orthogonal, xavier
    from diffshard.pipelines.base import Pipeline, PipelinePlan
    from diffshard.pipelines.delayed_gradients import DelayedArray, current_version, delayed
    from diffshard.pipelines.execution import StageError
    from diffshard.pipelines.microbatches import in_microbatches
    from diffshard.pipelines.pipelined_function import PipelinedFunction
    from diffshard.pipelines.staged_array import StagedArray
    from diffshard.placing import Placement, place
    from diffshard.plans.comparison import Comparison
    from diffshard.plans.whole_work import WholeWorkWarning
    from diffshard.renting import Offer, PlannedOffer, Rental, rent
    from diffshard.resharding.moves import Move
    from diffshard.resharding.reshard import reshard, reshard_price
    from diffshard.robust_gradients import ZenoReport, ZenoResult, replica_gradients, zeno, zeno_mean
    from diffshard.sharding_search.number_formats import Formats
    from diffshard.sharding_search.plan import Plan
    from diffshard.sharding_search.planned_function import PlannedFunction
    from diffshard.sharding_search.search import search
    from diffshard.sharding_search.step_objective import RelaxedStep
    from diffshard.solving.objectives.objective import Objective
    from diffshard.solving.solve import solve
    from diffshard.successive_halving import halving
    from search_spaces.communication.base import BFLOAT16, FLOAT8, INT4, INT8
    from search_spaces.communication.last_gradient import LastGradient
    from search_spaces.communication.layers.attention import windowed_attention
    from search_spaces.communication.layers.expert import expert_layer
    from search_spaces.communication.places import alternatives
    from search_spaces.communication.space import CommunicationSpace
    from search_spaces.communication.strategies import Encode, ErrorFeedback, EveryK, Exact, Schedule
    from search_spaces.embedding_tables.base import EmbeddingTable
    from search_spaces.sharding.opaque.checking import check_kernel
    from search_spaces.sharding.opaque.declaration import kernel

_NAMES_OF = {
    "cost.base": ("Hardware", "Link", "Problem"),
    "cost.clusters": ("Cluster",),
    "cost.host_groups": ("Hosts", "Submesh"),
    "cost.lines": ("Line",),
    "cost.presets": ("PRESET_NAMES", "preset"),
    "cost.quantities": ("LiveMemory", "Quantity"),
    "diffshard.base": (
        "InfeasibleError",
        "NumbersError",
        "PlanError",
        "ProcessesError",
        "Proposal",
        "Solution",
        "Solver",
    ),
    "diffshard.bilevel_search.estimators.curvature": ("curvature",),
    "diffshard.bilevel_search.estimators.mixture": ("mixture",),
    "diffshard.bilevel_search.estimators.sampled": ("sampled",),
    "diffshard.bilevel_search.plans.pareto": ("Pareto", "pareto"),
    "diffshard.bilevel_search.plans.plan": ("BilevelPlan",),
    "diffshard.bilevel_search.proving": ("CandidatesData",),
    "diffshard.bilevel_search.search": ("BilevelSearch", "bilevel"),
    "diffshard.calibration": ("calibrate",),
    "diffshard.budgets.base": ("Budget", "Phase"),
    "diffshard.budgets.budget": ("budget",),
    "diffshard.budgets.logs": ("phases_of_log",),
    "diffshard.comparison.compare": ("compare",),
    "diffshard.elastic.manifests": ("CheckpointError",),
    "diffshard.elastic.resume": ("resume",),
    "diffshard.resharding.moves": ("Move",),
    "diffshard.resharding.reshard": ("reshard", "reshard_price"),
    "diffshard.elastic.training": ("Training",),
    "diffshard.experts.plans": ("ExpertPlans", "expert_plans"),
    "diffshard.expert_groups.assignment": ("assign_experts",),
    "diffshard.expert_groups.grouping": ("group_experts", "reassign_experts"),
    "diffshard.expert_groups.layer_program": ("RoutedTokens",),
    "diffshard.expert_groups.layout": ("ExpertLayout",),
    "diffshard.expert_groups.loads": ("ExpertLoads",),
    "diffshard.expert_groups.plans": ("ExpertAssignment", "GroupPlan"),
    "diffshard.embedding_tables.learned_cost": ("LearnedTableCost",),
    "diffshard.embedding_tables.learning": ("host_table_cost", "learn_table_cost"),
    "diffshard.embedding_tables.plan": ("TablePlan",),
    "diffshard.embedding_tables.reference": ("padded_ids",),
    "diffshard.embedding_tables.search": ("shard_tables",),
    "diffshard.hardware_file": ("load_hardware", "save_hardware"),
    "diffshard.initialisation": ("init_search", "kaiming", "orthogonal", "xavier"),
    "diffshard.pipelines.base": ("Pipeline", "PipelinePlan"),
    "diffshard.pipelines.delayed_gradients": ("DelayedArray", "current_version", "delayed"),
    "diffshard.pipelines.execution": ("StageError",),
    "diffshard.pipelines.microbatches": ("in_microbatches",),
    "diffshard.pipelines.pipelined_function": ("PipelinedFunction",),
    "diffshard.pipelines.staged_array": ("StagedArray",),
    "diffshard.placing": ("Placement", "place"),
    "diffshard.plans.comparison": ("Comparison",),
    "diffshard.plans.whole_work": ("WholeWorkWarning",),
    "diffshard.renting": ("Offer", "PlannedOffer", "Rental", "rent"),
    "diffshard.robust_gradients": ("ZenoReport", "ZenoResult", "replica_gradients", "zeno", "zeno_mean"),
    "diffshard.sharding_search.plan": ("Plan",),
    "diffshard.sharding_search.search": ("search",),
    "diffshard.sharding_search.number_formats": ("Formats",),
    "diffshard.sharding_search.step_objective": ("RelaxedStep",),
    "diffshard.sharding_search.planned_function": ("PlannedFunction",),
    "diffshard.solving.objectives.objective": ("Objective",),
    "diffshard.solving.solve": ("solve",),
    "diffshard.successive_halving": ("halving",),
    "search_spaces.communication.layers.expert": ("expert_layer",),
    "search_spaces.communication.places": ("alternatives",),
    "search_spaces.communication.base": ("BFLOAT16", "FLOAT8", "INT4", "INT8"),
    "search_spaces.communication.space": ("CommunicationSpace",),
    "search_spaces.communication.last_gradient": ("LastGradient",),
    "search_spaces.communication.strategies": ("Encode", "ErrorFeedback", "EveryK", "Exact", "Schedule"),
    "search_spaces.communication.layers.attention": ("windowed_attention",),
    "search_spaces.embedding_tables.base": ("EmbeddingTable",),
    "search_spaces.sharding.opaque.checking": ("check_kernel",),
    "search_spaces.sharding.opaque.declaration": ("kernel",),
}
_MODULES = ("nnx",)
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "BFLOAT16",
    "FLOAT8",
    "INT4",
    "INT8",
    "PRESET_NAMES",
    "BilevelPlan",
    "BilevelSearch",
    "Budget",
    "CandidatesData",
    "CheckpointError",
    "Cluster",
    "CommunicationSpace",
    "Comparison",
    "DelayedArray",
    "EmbeddingTable",
    "Encode",
    "ErrorFeedback",
    "EveryK",
    "Exact",
    "ExpertAssignment",
    "ExpertLayout",
    "ExpertLoads",
    "ExpertPlans",
    "Formats",
    "GroupPlan",
    "Hardware",
    "Hosts",
    "InfeasibleError",
    "LastGradient",
    "LearnedTableCost",
    "Line",
    "Link",
    "LiveMemory",
    "Move",
    "NumbersError",
    "Objective",
    "Offer",
    "Pareto",
    "Phase",
    "Pipeline",
    "PipelinePlan",
    "PipelinedFunction",
    "Placement",
    "Plan",
    "PlanError",
    "PlannedFunction",
    "PlannedOffer",
    "Problem",
    "ProcessesError",
    "Proposal",
    "Quantity",
    "RelaxedStep",
    "Rental",
    "RoutedTokens",
    "Schedule",
    "Solution",
    "Solver",
    "StageError",
    "StagedArray",
    "Submesh",
    "TablePlan",
    "Training",
    "WholeWorkWarning",
    "ZenoReport",
    "ZenoResult",
    "alternatives",
    "assign_experts",
    "bilevel",
    "budget",
    "calibrate",
    "check_kernel",
    "compare",
    "current_version",
    "curvature",
    "delayed",
    "expert_layer",
    "expert_plans",
    "group_experts",
    "halving",
    "host_table_cost",
    "in_microbatches",
    "init_search",
    "kaiming",
    "kernel",
    "learn_table_cost",
    "load_hardware",
    "mixture",
    "nnx",
    "orthogonal",
    "padded_ids",
    "pareto",
    "phases_of_log",
    "place",
    "preset",
    "reassign_experts",
    "rent",
    "replica_gradients",
    "reshard",
    "reshard_price",
    "resume",
    "sampled",
    "save_hardware",
    "search",
    "shard_tables",
    "solve",
    "windowed_attention",
    "xavier",
    "zeno",
    "zeno_mean",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used.

    Raises:
      AttributeError: the package has no such name.
    """
    if name in _MODULES:
        return importlib.import_module(f"diffshard.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'diffshard' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # the next use finds it without a call
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "jax" in sys.modules:  # a process that ends before it uses any name has to tell the others of its job, too
    importlib.import_module("diffshard.endings")
