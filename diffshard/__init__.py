"""Automatic parallelisation for JAX: `search(fn, mesh)` finds how a function runs on a mesh, and runs it so."""

from cost.hardware import Hardware, Link
from cost.presets import PRESET_NAMES, preset
from cost.problem import Problem
from diffshard.calibrate import calibrate
from diffshard.make_plan import InfeasibleError
from diffshard.place import Placement, place
from diffshard.plan import Plan, PlanError
from diffshard.search import Searched, search
from diffshard.solve import Solution, solve

__version__ = "0.1.0"
__all__ = [
    "PRESET_NAMES",
    "Hardware",
    "InfeasibleError",
    "Link",
    "Placement",
    "Plan",
    "PlanError",
    "Problem",
    "Searched",
    "Solution",
    "calibrate",
    "place",
    "preset",
    "search",
    "solve",
]
