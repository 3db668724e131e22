"""Automatic parallelisation for JAX: `search(fn, mesh)` finds how a function runs on a mesh, and runs it so."""

from cost.hardware import Hardware, Link
from cost.presets import PRESET_NAMES, preset
from cost.problem import Problem
from diffshard.bilevel.pareto import Pareto, pareto
from diffshard.bilevel.plan import BilevelPlan
from diffshard.bilevel.prove import CandidatesData
from diffshard.bilevel.search import BilevelSearch, bilevel
from diffshard.calibrate import calibrate
from diffshard.halving import halving
from diffshard.init_search import init_search
from diffshard.make_plan import InfeasibleError
from diffshard.place import Placement, place
from diffshard.plan import Plan, PlanError
from diffshard.search import Searched, search
from diffshard.solve import Solution, solve
from search_spaces.communication.capacity import expert_layer
from search_spaces.communication.interpreter import alternatives
from search_spaces.communication.space import CommunicationSpace
from search_spaces.communication.window import windowed_attention

__version__ = "0.1.0"
__all__ = [
    "PRESET_NAMES",
    "BilevelPlan",
    "BilevelSearch",
    "CandidatesData",
    "CommunicationSpace",
    "Hardware",
    "InfeasibleError",
    "Link",
    "Pareto",
    "Placement",
    "Plan",
    "PlanError",
    "Problem",
    "Searched",
    "Solution",
    "alternatives",
    "bilevel",
    "calibrate",
    "expert_layer",
    "halving",
    "init_search",
    "pareto",
    "place",
    "preset",
    "search",
    "solve",
    "windowed_attention",
]
