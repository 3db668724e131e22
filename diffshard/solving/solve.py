"""The entry to all solvers: `solve` takes one by its name or as a function, checks the arguments and runs the loop.

A solver is a function in a file of its own under `solvers/`, called `solve` there: a generator that yields `Proposal`s
(a choice, a lower bound, or both) for as long as it likes. The loop in `loop.py` prices every choice exactly, keeps the
best, and watches the time and Ctrl-C. To add a solver, add the file: its name is the solver's name, and the conformance
tests find it.
"""

import functools
import importlib
import inspect
import math
import pkgutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import jax
import numpy as np

from cost.base import Problem, num_strategies
from cost.evaluation import checked_choice, evaluate
from cost.quantities import with_weights
from cost.real_numbers import AmountOrInf, Limit, as_array, checked_number, is_real, real_number, whole_number
from cost.validation import validate, validate_quantities, with_finite_loads
from diffshard.base import OPTIMAL_GAP, Deadline, Progress, Solution, Solver
from diffshard.public_names import did_you_mean
from diffshard.solving import solvers
from diffshard.solving.coarse_to_fine import run_coarse_to_fine
from diffshard.solving.form import Reduction, has_few_pairs, is_node_form, node_form
from diffshard.solving.loop import run_solver
from diffshard.solving.objectives.minimise import TANGENT_SHARE, minimise
from diffshard.solving.objectives.objective import Affine, Objective, PricedObjective, split_loads
from diffshard.solving.presolve.pipeline import presolve

DEFAULT_SOLVER = "gradient"
_PRESOLVE_GRACE_S = 0.25
"""Seconds after the time limit in which presolve may still begin a step: half of the half second that an answer may be
late, because a small problem is presolved in milliseconds and solved much better so."""
_FIRST_GAP, _FIRST_SHARE = 1e-3, 0.5
"""The first tangent's relative gap, and its share of the time: nothing is feasible before it is solved."""
_NUM_RANDOM = 64
"""Choices whose tangents make the first one."""


class SolverOptions(TypedDict, total=False):
    """Options of each front end that asks a solver; each may be left out.

    Attributes:
      solver: the name of a solver (`diffshard.solvers`), or a function that follows `diffshard.solvers.Solver`; None
        takes the front end's.
      time_limit_s: wall-clock seconds for the solver; None lets it end by its own rule.
      key: a JAX random key or a seed; None is seed 0.
    """

    solver: str | Solver | None
    time_limit_s: float | None
    key: jax.Array | int | None


class SolveOptions(SolverOptions, total=False):
    """Options of each front end that solves one problem; each may be left out.

    Attributes:
      solver, time_limit_s, key: as in `SolverOptions`.
      progress: called as `progress(seconds, cost, lower_bound)` at each improvement.
    """

    progress: Progress | None


def solver_options(
    options: Mapping[str, Any],
    names: Iterable[str] = SolverOptions.__annotations__,
    function: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Returns all options of these names, None for those that were left out.

    Args:
      function: that was given the options; an error proposes its own arguments as well.

    Raises:
      TypeError: there is any other option.
    """
    if unknown := [name for name in options if name not in names]:
        parameters = {} if function is None else inspect.signature(function).parameters
        own = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
        advice = did_you_mean(unknown[0], (*own, *names)) or "."
        where = "" if function is None else f" of {function.__name__}, whose own are {', '.join(own)}"
        raise TypeError(f"`{unknown[0]}` is no argument{where}; those for the solver are {', '.join(names)}{advice}")
    return {name: options.get(name) for name in names}


def check_solver_options(solver: str | Solver | None, time_limit_s: float | None, key: jax.Array | int | None) -> None:
    """Raises `ValueError` if there is no such solver, or the time limit or the key is none; names the argument."""
    if solver is not None:
        resolve(solver)
    if time_limit_s is not None:
        checked_number("time_limit_s", time_limit_s, Limit, " of seconds or None")
    check_key(key)


def check_key(key: jax.Array | int | None) -> None:
    """Raises `ValueError` unless a key is a random key, None, or a seed of at most 64 bits."""
    if key is None or isinstance(key, jax.Array):
        return
    seed = whole_number(key)
    if seed is None or abs(seed) >= 2**63:
        raise ValueError(f"`key` must be a seed below 2^63, a JAX random key or None, got {key!r}.")


def random_key(key: jax.Array | int | None) -> jax.Array:
    """Returns a checked key, made of a seed if it is one; None is seed 0."""
    return key if isinstance(key, jax.Array) else jax.random.key(int(key or 0))


def checked_solve_options(options: Mapping[str, Any], function: Callable[..., Any]) -> SolveOptions:
    """Returns all four options that `function` was given, None for those left out; also where no solver is asked."""
    checked: Any = solver_options(options, SolveOptions.__annotations__, function)
    progress = checked["progress"]
    check_solver_options(checked["solver"], checked["time_limit_s"], checked["key"])
    if progress is not None and not callable(progress):
        raise TypeError(f"`progress` must be a function of seconds, cost and bound, or None, not {progress!r}.")
    return checked


def solve(
    problem: Problem,
    *,
    reduce: Callable[[Problem], Reduction] = presolve,
    tied: np.ndarray | None = None,
    start: Sequence[int] | np.ndarray | None = None,
    stop_gap: float = OPTIMAL_GAP,
    objective: Objective | None = None,
    **options: Unpack[SolveOptions],
) -> Solution:
    """Finds a cheap choice of strategies and a bound on how cheap any can be.

    Args:
      problem: what to solve; it is checked first.
      reduce: the presolve; `identity` hands the problem to the solver as it is.
      tied: `[V]` numbers, equal for nodes that shall take equal strategies where that costs at most a ten-thousandth
        more, as those of equal layers; a large problem of many such nodes is solved much faster. None ties none.
      start: `[V]` a choice that may be good already, as that of a similar problem. The result is never worse, and the
        search ends as soon as the bound shows that little can be gained.
      stop_gap: the relative gap between choice and bound at which the search ends; by default only an optimum ends it.
      objective: a differentiable function of quantities of the choice that is added to the problem's cost, see
        `diffshard.solving.objectives`. Its tangents are solved one after the other, without a time limit at most 100.
      **options: `SolveOptions`; the solver is "gradient" unless another one is named. The time limit includes presolve,
        whose steps begin at most a quarter of a second later. Reading and pricing a problem is not interrupted: about
        a tenth of a millisecond for each node, four seconds for forty thousand.

    Returns:
      The best choice that the solver proposed, its exact cost and the bound. It says so if the choice is not feasible,
      and by how much; Ctrl-C and the time limit return the best until then.

    Raises:
      ValueError: the problem breaks a rule of `Problem`, the solver is unknown, the time limit is not positive, the key
        is neither a key nor a seed, tied nodes have different numbers of strategies, or the start or a proposal does
        not have a strategy for each node, or the objective is not finite, has no gradient or reads what is no quantity.
      TypeError: the problem is no `Problem`, the solver yields something that is no `Proposal`, or the objective does
        not return a scalar.
    """
    begin_s, checked = time.perf_counter(), checked_solve_options(options, solve)
    checked_number("stop_gap", stop_gap, AmountOrInf)
    if not callable(reduce):
        raise TypeError(
            "`reduce` must be a function of a problem, such as `diffshard.solving.form.identity`, which hands "
            f"the problem to the solver as it is, not {reduce!r}."
        )
    solver, key, progress = checked.get("solver") or DEFAULT_SOLVER, checked.get("key"), checked.get("progress")
    run, time_limit_s = resolve(solver), real_number(checked.get("time_limit_s"))
    if time_limit_s is not None and reduce is presolve:
        reduce = functools.partial(presolve, deadline=begin_s + time_limit_s + _PRESOLVE_GRACE_S)
    key = random_key(key)
    if objective is not None or not isinstance(problem, Problem) or not is_node_form(problem):
        validate(problem)
        _check_objective(objective, problem)
        if len(problem.edge_load) and not has_few_pairs(problem):
            problem, objective = split_loads(with_finite_loads(problem), objective)
    own: dict[str, Any] = {"solver": solver, "key": key, "reduce": reduce, "tied": tied, "stop_gap": stop_gap}
    if objective is not None:
        return _solve_objective(problem, objective, start, Deadline(time_limit_s, begin_s), progress, own)
    if tied is not None:
        _check_tied(problem, tied)
    if not is_node_form(problem):
        form = node_form(problem)
        own["tied"] = None if tied is None else form.tied(np.asarray(tied))
        begin = None if start is None else form.choice_of(start)
        remaining_s = Deadline(time_limit_s, begin_s).remaining_s()
        found = solve(form.problem, time_limit_s=remaining_s, progress=progress, start=begin, **own)
        return form.solution(found)
    of_loop: dict[str, Any] = {"key": key, "reduce": reduce, "stop_gap": stop_gap}
    of_loop |= {"time_limit_s": time_limit_s, "progress": progress, "start": start}
    if tied is not None:
        return run_coarse_to_fine(problem, run, tied, **of_loop)
    return run_solver(problem, run, **of_loop)


def _solve_objective(
    problem: Problem,
    objective: Objective,
    start: Sequence[int] | np.ndarray | None,
    deadline: Deadline,
    progress: Progress | None,
    options: dict[str, Any],
) -> Solution:
    """Solves the tangents of an objective; without a start first the mean of random ones."""

    def solve_tangent(tangent: Problem, near: np.ndarray | None, gap: float, share: float = TANGENT_SHARE) -> Solution:
        return solve(tangent, **options | {"start": near, "time_limit_s": deadline.remaining_s(share), "stop_gap": gap})

    def tell(cost: float, lower_bound: float) -> None:
        if progress is not None:
            progress(deadline.elapsed_s, cost, lower_bound)

    priced = PricedObjective(objective, problem)
    choice, is_stopped = None if start is None else checked_choice(problem, start, "start"), False
    bound, bounded = -math.inf, None
    if choice is None or not evaluate(problem, choice).feasible:
        bounded = _smoothed_tangent(priced, problem)
        weights = priced.by_name(bounded.gradient)
        tangent = with_weights(problem, objective.quantities, weights)
        first = solve_tangent(tangent, choice, max(options["stop_gap"], _FIRST_GAP), _FIRST_SHARE)
        choice, is_stopped = np.array(first.choice), first.status == "interrupted"
        bound = bounded.constant + first.lower_bound
        if not first.feasible:  # what the tangent says is not yet what the objective does
            own = evaluate(problem, choice)
            if own.feasible:  # so that only the objective forbids it
                priced.check_size(priced.amounts(choice))
            cost = own.cost + float(priced.prices(priced.amounts(choice)[None])[0])
            return first._replace(cost=cost, lower_bound=bound, history=())
    found = minimise(
        problem,
        objective,
        solve_tangent,
        choice,
        is_over=lambda: is_stopped or deadline.is_over(),
        tell=tell,
        stop_gap=options["stop_gap"],
        most_problems=None if deadline.limit_s is None else math.inf,
        lower_bound=bound,
        bounded=bounded,
    )
    return found._replace(status="interrupted") if is_stopped else found


def _smoothed_tangent(priced: PricedObjective, problem: Problem) -> Affine:
    """Returns the mean of the tangents at random choices: a tangent at one has weights for its busiest device only.

    Source: J. Duchi, P. Bartlett and M. Wainwright, "Randomized Smoothing for Stochastic Optimization" (2012).
    """
    sizes, generator = num_strategies(problem), np.random.default_rng(0)
    choices = generator.integers(0, sizes, (_NUM_RANDOM, len(sizes)))
    tangents = [priced.tangent_below(priced.amounts(choice)).affine for choice in choices]
    constants, gradients = zip(*tangents, strict=True)
    return Affine(float(np.mean(constants)), np.mean(gradients, axis=0))


def _check_objective(objective: Objective | None, problem: Problem) -> None:
    if objective is None:
        return
    if not isinstance(objective, Objective):
        raise TypeError(
            "`objective` of `solve` must be a `diffshard.objectives.Objective(function, quantities)`, not "
            f"{'a function' if callable(objective) else repr(objective)}."
        )
    if not callable(objective.function):
        raise TypeError(
            f"`{objective.name}.function` must be a function of amounts, a dict by the names of `quantities`, not "
            f"{objective.function!r}."
        )
    validate_quantities(objective.quantities, problem, f"{objective.name}.quantities")


def _check_tied(problem: Problem, tied: np.ndarray) -> None:
    sizes, tied = num_strategies(problem), as_array(tied)
    if tied.shape != sizes.shape or not is_real(tied):
        raise ValueError(
            f"`tied` must have one number for each of the {len(sizes)} nodes, got {tied.dtype} of shape {tied.shape}."
        )
    _, first, number = np.unique(tied, return_index=True, return_inverse=True)
    wrong = np.flatnonzero(sizes != sizes[first][number])
    if wrong.size:
        v, u = int(wrong[0]), int(first[number[wrong[0]]])
        raise ValueError(f"`tied` ties nodes {u} and {v}, which have {sizes[u]} and {sizes[v]} strategies.")


def solver_names() -> tuple[str, ...]:
    """Returns the solvers that `solve` knows by name: the files of `diffshard/solving/solvers`."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(solvers.__path__) if module.name[0] != "_"))


def resolve(solver: str | Solver) -> Solver:
    """Returns the solver of a name; a function is returned as it is.

    Raises:
      ValueError: no solver has this name, or it is a class.
      TypeError: the function takes other arguments than a `Solver`.
    """
    if callable(solver) and not isinstance(solver, type):
        _check_arguments(solver)
        return solver
    if solver not in solver_names():
        raise ValueError(f"`solver` must be one of {', '.join(solver_names())}, or a function; got {solver!r}.")
    return importlib.import_module(f"diffshard.solving.solvers.{solver}").solve


def _check_arguments(solver: Solver) -> None:
    try:
        inspect.signature(solver).bind(None, time_limit_s=None, key=None)
    except ValueError:  # functions written in C may not say what they take
        return
    except TypeError as error:
        raise TypeError(f"`solver` must be a function of (problem, *, time_limit_s, key): {error}.") from None
