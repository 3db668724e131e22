"""The protocol of solvers: `diffshard.solve(problem, solver=...)` takes a name or a generator function of your own.

>>> def first(problem, *, time_limit_s, key):
...     yield diffshard.solvers.Proposal(np.zeros(len(problem.node_cost), int))
>>> solution = diffshard.solve(problem, solver=first)

A `Solver` proposes choices and lower bounds; the loop prices each choice exactly and keeps the best, so that a solver
cannot report a wrong cost. The names are the files of `diffshard/solving/solvers/`: "gradient" (the default) for large
problems, "exact" (HiGHS) and "dynamic_programming" for proofs on small ones, "greedy", "beam", "mcmc", "primal",
"random" and "exhaustive" for comparisons. `SolverOptions` and `SolveOptions` are what front ends take for their solver.
"""

from typing import TYPE_CHECKING

from diffshard.public_names import lazy_names

if TYPE_CHECKING:
    from diffshard.base import Proposal as Proposal
    from diffshard.base import Solution as Solution
    from diffshard.base import Solver as Solver
    from diffshard.solving.solve import SolveOptions as SolveOptions
    from diffshard.solving.solve import SolverOptions as SolverOptions

__getattr__, __dir__, __all__ = lazy_names(__name__)
