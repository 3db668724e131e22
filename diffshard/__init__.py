"""Automatic parallelisation for JAX: `search(fn, mesh)` finds how a function runs on a mesh, and runs it so."""

from cost.base import Hardware, Link, Problem
from cost.calibration import calibrate
from cost.presets import PRESET_NAMES, preset
from diffshard.base import InfeasibleError, PlanError, Solution
from diffshard.bilevel_search.pareto import Pareto, pareto
from diffshard.bilevel_search.plan import BilevelPlan
from diffshard.bilevel_search.prove import CandidatesData
from diffshard.bilevel_search.search import BilevelSearch, bilevel
from diffshard.initialisation import init_search
from diffshard.placing import Placement, place
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.search import search
from diffshard.sharding_search.searched import Searched
from diffshard.solving.solve import solve
from diffshard.successive_halving import halving
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
