"""What the bilevel search asks of a space of strategies that change numbers, and how a choice is written for it.

Letters for sizes: V nodes (groups of sites that share one choice), S_v strategies of node v.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Problem, is_forbidden, num_strategies
from cost.evaluation import evaluate
from cost.relaxed import relaxed_cost
from cost.validation import validate

Choice = tuple[int, ...]
"""V strategy indices."""
Params = Any
Batch = Any
Residuals = Any
Rows = list[jax.Array]
"""V arrays `[S_v]` of weights on the simplex."""
Selection = Sequence[Any]
"""What runs at each of V nodes: a strategy's index, static or traced, or weights `[S_v]` for the sum of all results."""


@runtime_checkable
class HasProblem(Protocol):
    """Anything whose cost is a `Problem`: all that is asked where the loss does not depend on the choice."""

    @property
    def problem(self) -> Problem:
        """A node for each choice that is to be made, costs in seconds."""
        ...


@runtime_checkable
class HasLossless(Protocol):
    """A space that knows which choice is exact; it then keeps every bound on the loss."""

    def exact_choice(self) -> Sequence[int]:
        """The exact strategy of each node, `[V]`."""
        ...


class Space(HasProblem, Protocol):
    """Strategies that change the loss as well as the cost; losses, gradients and loss_increases can be jitted."""

    def strategy_names(self, node: int) -> Sequence[str]:
        """The names of the strategies of one node, `[S_v]`."""
        ...

    def loss(self, params: Params, batch: Batch, choice: Selection, key: jax.Array, step: jax.Array) -> jax.Array:
        """The loss of a selection, a scalar."""
        ...

    def loss_and_gradients(
        self, params: Params, batch: Batch, choice: Selection, state: Residuals, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Params, Residuals]:
        """The loss, its gradients and what the strategies carry to the next step."""
        ...

    def mixed_loss(self, params: Params, batch: Batch, weights: Rows, key: jax.Array, step: jax.Array) -> jax.Array:
        """The loss when each site's result is Σ_j w_j op_j(x); differentiable in `params` and `weights`."""
        ...

    def loss_increases(
        self, params: Params, batch: Batch, key: jax.Array, *, step_sizes: Params, step: jax.Array
    ) -> Rows:
        """For each node and strategy the expected increase of the loss, to second order: V arrays `[S_v]`.

        With e_j the strategy's error, ½ E[(g·e_j)²] where it is one of results, and ¼ Σ η e_j² where it is one of the
        gradients that training steps along, η = `step_sizes`, as `params`.
        """
        ...

    def state(self, params: Params) -> Residuals:
        """What strategies carry from step to step, before the first one."""
        ...

    def seconds(self, choice: Sequence[int]) -> float:
        """The cost of a discrete choice."""
        ...


def check_key(key: Any) -> None:
    """Refuses what is no random key; those of `jax.random.PRNGKey` are some.

    Raises:
      ValueError: says how a key is made.
    """
    try:
        jax.eval_shape(jax.random.split, key)
    except (TypeError, ValueError):
        raise ValueError(f"`key` must be a random key, as `jax.random.key(0)` is; got {key!r}.") from None


def check_arguments(space: object, **given: Any) -> None:
    """Refuses parameters and batches of other shapes or types than a space was built for.

    A space says what these are by an attribute `arguments`, `(params, batch)`; without it there is nothing to check.

    Args:
      space: of strategies.
      **given: `params` or `batch` or both.

    Raises:
      ValueError: names the first array that differs, what it must be and what it is.
    """
    for name, expected in zip(("params", "batch"), getattr(space, "arguments", ()), strict=False):
        if name not in given:
            continue
        structures = [jax.tree.structure(tree) for tree in (expected, given[name])]
        if structures[0] != structures[1]:
            raise ValueError(
                f"`{name}` must have the structure that `space` was built for, {structures[0]}; got {structures[1]}."
            )
        leaves = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(given[name]), strict=True)
        for (path, wanted), leaf in leaves:
            shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
            if (shape, dtype) != (wanted.shape, wanted.dtype):
                raise ValueError(
                    f"`{name}{jax.tree_util.keystr(path)}` must be {wanted.dtype}{list(wanted.shape)}, which `space` "
                    f"was built for, got {dtype}{list(shape)}; give such, or build the space anew."
                )


def is_function(space: object) -> bool:
    """Whether `space` makes a space rather than being one."""
    return callable(space) and (isinstance(space, type) or not isinstance(space, HasProblem))


def is_lossless(space: object) -> bool:
    """Whether the loss cannot depend on the choice: a bare `Problem`, or a space without any loss."""
    return not hasattr(space, "loss")


def problem_of(space: object) -> Problem:
    """The problem of a space, or the problem itself.

    Raises:
      ValueError: there is no problem, it breaks a rule of `Problem`, there is nothing to choose, or a transfer is
        forbidden (rows of weights cannot keep apart what only exists in pairs).
    """
    problem = space if isinstance(space, Problem) else space.problem if isinstance(space, HasProblem) else None
    if problem is None:
        raise ValueError(
            f"`space` must be a Problem, an object with a attribute `problem`, or a function that makes one of "
            f"(loss_fn, mesh_axes, params, batch); got {type(space).__name__}."
        )
    validate(problem)
    if any(is_forbidden(cost).any() for cost in problem.edge_cost):
        raise ValueError(
            "`space` forbids pairs of strategies (infinite edge costs), which rows of weights cannot respect; "
            "tie these nodes, or use `diffshard.solve`."
        )
    if any(is_forbidden(cost).all() for cost in problem.node_cost):
        raise ValueError("`space` has a node whose strategies are all forbidden; allow one.")
    if max((int(mask.sum()) for mask in allowed(problem)), default=0) < 2:
        axes = dict(getattr(space, "mesh_axes", {}))
        if axes and math.prod(axes.values()) == 1:
            raise ValueError(
                f"`mesh` is of one device, {axes}: nothing is communicated, so there is nothing to choose; give a mesh "
                f"of more, which may be an AbstractMesh."
            )
        raise ValueError(
            "`space` has no node with two strategies that are allowed, so there is nothing to choose; give it some."
        )
    return problem


def node_names(space: object, problem: Problem) -> tuple[str, ...]:
    """V names: those of the space's `groups`, where it has some, or numbers."""
    groups = getattr(space, "groups", [None] * len(problem.node_cost))
    return tuple(str(getattr(group, "name", v)) for v, group in enumerate(groups))


def allowed(problem: Problem) -> list[np.ndarray]:
    """V arrays `[S_v]`: which strategies may be chosen."""
    return [~is_forbidden(cost) for cost in problem.node_cost]


def reference_choice(space: object, problem: Problem) -> Choice:
    """The choice that increases and cost ratios are measured against: exact where the space knows what is exact.

    A space says so by a method `exact_choice()`, `[V]` indices; without it each node's first strategy is taken.
    """
    if isinstance(space, HasLossless):
        return tuple(int(strategy) for strategy in space.exact_choice())
    return tuple(int(np.argmax(mask)) for mask in allowed(problem))


def one_hot(problem: Problem, choice: Sequence[int]) -> Rows:
    """A discrete choice as rows."""
    sizes = num_strategies(problem).tolist()
    return [jax.nn.one_hot(strategy, size) for strategy, size in zip(choice, sizes, strict=True)]


def softmax_rows(problem: Problem, logits: Rows) -> Rows:
    """Rows of logits; forbidden strategies have weight 0."""
    masked = zip(allowed(problem), logits, strict=True)
    return [jax.nn.softmax(jnp.where(mask, row, -jnp.inf)) for mask, row in masked]


def cost_ratio(problem: Problem, rows: Rows, reference_cost: float) -> jax.Array:
    """The relaxed cost as a ratio to a reference, so that no size depends on the unit of time."""
    return relaxed_cost(_without_forbidden(problem), rows) / reference_cost


def reference_cost(space: object, problem: Problem) -> float:
    """Seconds that ratios are formed with: the exact choice's, or the mean strategies' where all are exact.

    Raises:
      ValueError: it is 0, so that there is nothing to save.
    """
    if is_lossless(space):
        uniform = softmax_rows(problem, [jnp.zeros(size) for size in num_strategies(problem)])
        seconds = float(relaxed_cost(_without_forbidden(problem), uniform))
    else:
        seconds = float(evaluate(problem, reference_choice(space, problem)).cost)
    if not 0 < seconds < np.inf:
        raise ValueError(f"`space` must have a positive finite cost at its reference choice, got {seconds} s.")
    return seconds


def _without_forbidden(problem: Problem) -> Problem:
    """Forbidden strategies have no weight ever, so any finite cost does for them."""
    costs = [np.where(is_forbidden(cost), 0.0, np.asarray(cost, float)) for cost in problem.node_cost]
    return problem._replace(node_cost=costs)
