"""Automatic parallelisation for JAX: `search(fn, mesh)` finds how a function runs on a mesh, and runs it so.

The names here are what every program needs. The others stand in modules by topic, which a program need not import:
`import diffshard` is enough for `diffshard.tables.shard_tables`.

| module | has |
| --- | --- |
| `baselines` | plans by the rules of papers, to compare with |
| `elastic` | training that goes on with other devices; devices that change by a schedule; moves of arrays |
| `experts` | mixtures of experts on unequal workers |
| `formats` | what changes numbers: float8 products, lossy collectives, and what `bilevel` chooses from |
| `hardware` | measured hardware and its files; what to rent |
| `initialisation` | starts that are compared by their first steps |
| `nnx` | functions that update flax's nnx modules in place |
| `objectives` | objectives of your own |
| `pipelines` | pipelines, batches in parts, layers on devices |
| `plans` | what plans say: certificates, comparisons, warnings |
| `robust_gradients`, `successive_halving` | gradients that resist faults; a race of candidates |
| `solvers` | the protocol of a solver of your own |
| `tables` | embedding tables on devices |
"""

import importlib
import sys
from typing import TYPE_CHECKING

from diffshard.public_names import lazy_names

if TYPE_CHECKING:
    from cost.base import Hardware as Hardware
    from cost.base import Link as Link
    from cost.base import Problem as Problem
    from cost.clusters import Cluster as Cluster
    from cost.clusters import Hosts as Hosts
    from cost.presets import preset as preset
    from diffshard import baselines as baselines
    from diffshard import elastic as elastic
    from diffshard import experts as experts
    from diffshard import formats as formats
    from diffshard import hardware as hardware
    from diffshard import initialisation as initialisation
    from diffshard import nnx as nnx
    from diffshard import objectives as objectives
    from diffshard import pipelines as pipelines
    from diffshard import plans as plans
    from diffshard import robust_gradients as robust_gradients
    from diffshard import solvers as solvers
    from diffshard import successive_halving as successive_halving
    from diffshard import tables as tables
    from diffshard.base import InfeasibleError as InfeasibleError
    from diffshard.base import NumbersError as NumbersError
    from diffshard.base import PlanError as PlanError
    from diffshard.base import ProcessesError as ProcessesError
    from diffshard.bilevel_search.plans.plan import BilevelPlan as BilevelPlan
    from diffshard.bilevel_search.search import bilevel as bilevel
    from diffshard.comparison.compare import compare as compare
    from diffshard.elastic.resume import resume as resume
    from diffshard.front_end import search as search
    from diffshard.pipelines.base import Pipeline as Pipeline
    from diffshard.pipelines.plan import PipelinePlan as PipelinePlan
    from diffshard.sharding_search.plan import Plan as Plan
    from diffshard.solving.solve import solve as solve
    from search_spaces.sharding.custom_calls.declaration import check_kernel as check_kernel
    from search_spaces.sharding.custom_calls.declaration import kernel as kernel

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_names(__name__)

if "jax" in sys.modules:  # a process that ends before it uses any name has to tell the others of its job, too
    importlib.import_module("diffshard.exit_notices")
