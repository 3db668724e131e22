"""`init_search`: trains many random initialisations briefly, side by side, and returns the best one's parameters.

Source: the idea of comparing starts by their first steps is old; the budget is spent by successive halving
(`diffshard.successive_halving.halving`), and the neighbourhood of the survivors is sampled by rotating their initial
values towards new ones, which keeps the variance that the initialiser chose.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diffshard.successive_halving import Halving, check_rungs, halving

Params = Any
InitFn = Callable[[jax.Array], Params]
Initializer = Callable[..., jax.Array]


class InitRecord(NamedTuple):
    """The outcome of an `init_search`.

    Attributes:
      first: the halving over `keys`.
      finer: the halving around the survivors, the first winner among them; None if there was no second round.
      loss: of the returned parameters after the last rung.
      steps: of training in all: steps × starts, summed over rungs.
    """

    first: Halving
    finer: Halving | None
    loss: float
    steps: int

    def __repr__(self) -> str:
        starts = [len(halving.table) for halving in (self.first, self.finer) if halving is not None]
        return f"InitRecord(loss={self.loss:.4g}, steps={self.steps}, starts={starts})"


class _Start(NamedTuple):
    """One start in training."""

    initial: Params
    params: Params
    opt_state: optax.OptState
    step: int


def loss_unless_diverged(loss: jax.Array, gradient_norm: jax.Array) -> jax.Array:
    """Returns the loss, or infinity where the gradient has vanished or exploded."""
    alive = jnp.isfinite(gradient_norm) & (gradient_norm > 1e-8)
    return jnp.where(alive, loss, jnp.inf)


def init_search(
    init_fn: InitFn,
    loss_fn: Callable[[Params, Any], jax.Array],
    keys: jax.Array,
    batches: Any,
    *,
    optimizer: optax.GradientTransformation | None = None,
    rungs: Sequence[int] = (5, 10, 20),
    keep: float = 0.5,
    score: Callable[[jax.Array, jax.Array], jax.Array] = loss_unless_diverged,
    num_finer: int = 0,
    spread: float = 0.3,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Params, InitRecord]:
    """Trains a start for each key for a short while, all at once, and keeps the better ones.

    >>> keys = jax.random.split(jax.random.key(0), 16)
    >>> params, record = init_search(kaiming(model_init), loss_fn, keys, batches, num_finer=8)

    Args:
      init_fn: `init_fn(key) -> params`; `xavier`, `kaiming` and `orthogonal` change a model's own.
      loss_fn: `loss_fn(params, batch) -> scalar`.
      keys: `[N]` random keys, no two alike.
      batches: a batch's pytree with a leading axis: one batch for each step of all rungs, and a last one on which
        starts are scored after each rung.
      optimizer: None is adam(1e-3).
      rungs: steps of each rung.
      keep: share of starts that goes on after each rung.
      score: of loss `[]` and gradient norm `[]` on the last batch; less is better.
      num_finer: starts in the second round, around the first round's survivors; 0 leaves it out.
      spread: how far those are rotated towards new initial values, from 0, the survivor's own, to 1, new ones.
      mesh: spreads the starts over all its devices; None takes one device.

    Returns:
      The best start's parameters, trained for all rungs, and a record.

    Raises:
      ValueError: `keys` are not random keys, or two are equal; too few batches, or numbers out of range.
    """
    count = _num_distinct(keys)
    if num_finer < 0 or not 0 < spread <= 1:
        raise ValueError(
            f"`num_finer` must not be negative and `spread` be above 0 and at most 1; got {num_finer} and {spread}."
        )
    check_rungs(rungs, keep)
    _check_batches(batches, sum(rungs) + 1)
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer
    train = _trainer(loss_fn, optimizer, batches, score, mesh)

    def search(initial: Params, num: int) -> Halving[_Start]:
        states = jax.vmap(optimizer.init)(initial)
        starts = [_Start(_at(initial, i), _at(initial, i), _at(states, i), 0) for i in range(num)]
        return halving(starts, train, rungs=rungs, keep=keep)

    best = first = search(jax.jit(jax.vmap(init_fn))(keys), count)
    finer = None
    if num_finer:
        survivors = [s for s, row in zip(first.trained, first.table, strict=True) if len(row.scores) == len(rungs)]
        centres = _stack([survivors[i % len(survivors)].initial for i in range(num_finer)])
        fresh = jax.random.split(jax.random.fold_in(keys[0], count), num_finer)
        finer = search(_rotate(centres, jax.jit(jax.vmap(init_fn))(fresh), spread), num_finer)
        if finer.table[0].scores[-1] < first.table[0].scores[-1]:
            best = finer
    loss = float(jax.jit(loss_fn)(best.winner.params, _at(batches, -1)))
    if not math.isfinite(loss):
        raise ValueError(f"`init_fn` gives no start that can be trained: the best loss is {loss}; lower the step size.")
    return best.winner.params, InitRecord(first, finer, loss, first.steps + (finer.steps if finer else 0))


def xavier(init_fn: InitFn) -> InitFn:
    """Returns `init_fn` with all matrices drawn by Glorot's normal initialiser; vectors (biases, scales) as they were.

    Convolution kernels count as spatial dimensions before (in, out); layers that are stacked on a leading axis would be
    taken for such and need an initialiser of their own.

    Source: Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks" (2010).
    """
    return _redraw(init_fn, jax.nn.initializers.glorot_normal())


def kaiming(init_fn: InitFn) -> InitFn:
    """Draws matrices as `xavier` does, by He's normal initialiser.

    Source: He et al., "Delving Deep into Rectifiers" (ICCV 2015).
    """
    return _redraw(init_fn, jax.nn.initializers.he_normal())


def orthogonal(init_fn: InitFn) -> InitFn:
    """Draws matrices as `xavier` does, orthogonal ones; leading dimensions count as rows.

    Source: Saxe, McClelland and Ganguli, "Exact solutions to the nonlinear dynamics of learning" (ICLR 2014).
    """
    return _redraw(init_fn, jax.nn.initializers.orthogonal())


def _redraw(init_fn: InitFn, initializer: Initializer) -> InitFn:
    def init(key: jax.Array) -> Params:
        leaves, structure = jax.tree.flatten(init_fn(key))
        keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
        new_leaves = [
            initializer(k, leaf.shape, leaf.dtype) if leaf.ndim > 1 else leaf
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, new_leaves)

    return init


def _check_batches(batches: Any, count: int) -> None:
    lengths = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(batches)}
    if lengths != {count}:
        raise ValueError(
            f"`batches` must have a leading axis of {count}: one batch for each step of `rungs` and one to score on; "
            f"got {sorted(lengths)}."
        )


def _num_distinct(keys: jax.Array) -> int:
    is_key = isinstance(keys, jax.Array) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if not is_key or keys.ndim != 1 or not len(keys):
        raise ValueError("`keys` must be an array [N] of random keys, as of `jax.random.split(jax.random.key(0), N)`.")
    data = np.asarray(jax.random.key_data(keys)).reshape(len(keys), -1)
    distinct = len(np.unique(data, axis=0))
    if distinct < len(keys):
        raise ValueError(
            f"`keys` must all differ, but of {len(keys)} only {distinct} do; make them with `jax.random.split`."
        )
    return len(keys)


def _trainer(
    loss_fn: Callable[[Params, Any], jax.Array],
    optimizer: optax.GradientTransformation,
    batches: Any,
    score: Callable[[jax.Array, jax.Array], jax.Array],
    mesh: jax.sharding.Mesh | None,
) -> Callable[[Sequence[_Start], int], tuple[list[_Start], list[float]]]:
    """Returns a function that trains all starts of a rung in one program, each step on the same batch."""

    def train_briefly(
        params: Params, opt_state: optax.OptState, steps: Any
    ) -> tuple[Params, optax.OptState, jax.Array]:
        def step(carry: tuple[Params, optax.OptState], batch: Any) -> tuple[tuple[Params, optax.OptState], None]:
            params, opt_state = carry
            updates, opt_state = optimizer.update(jax.grad(loss_fn)(params, batch), opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        (params, opt_state), _ = jax.lax.scan(step, (params, opt_state), steps)
        loss, gradient = jax.value_and_grad(loss_fn)(params, _at(batches, -1))
        return params, opt_state, score(loss, optax.tree.norm(gradient))

    train_all_briefly = jax.jit(jax.vmap(train_briefly, in_axes=(0, 0, None)))

    def train(starts: Sequence[_Start], num_steps: int) -> tuple[list[_Start], list[float]]:
        begin = starts[0].step
        num_devices = mesh.size if mesh is not None else 1
        all_starts = [*starts, *[starts[-1]] * (-len(starts) % num_devices)]
        stack = _stack([(start.params, start.opt_state) for start in all_starts])
        if mesh is not None:
            spec = jax.sharding.PartitionSpec(mesh.axis_names)
            stack = jax.device_put(stack, jax.sharding.NamedSharding(mesh, spec))
        steps = jax.tree.map(lambda leaf: leaf[begin : begin + num_steps], batches)
        params, opt_state, scores = jax.device_get(train_all_briefly(*stack, steps))
        ends = [
            _Start(start.initial, _at(params, i), _at(opt_state, i), begin + num_steps)
            for i, start in enumerate(starts)
        ]
        return ends, [float(s) for s in scores[: len(starts)]]

    return train


def _rotate(centres: Params, fresh: Params, spread: float) -> Params:
    """Returns √(1 - s²) centre + s fresh where the two differ: the variance stays, and so do biases and scales."""
    keep = math.sqrt(1 - spread**2)
    return jax.tree.map(lambda a, b: jnp.where(a == b, a, keep * a + spread * b).astype(a.dtype), centres, fresh)


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _at(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)
