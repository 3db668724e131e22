"""Means without the gradients of faulty replicas: each replica's gradient is tried on a small batch before the mean.

Plain data parallelism averages whatever the replicas send, so that one wrong gradient moves all parameters. Zeno ranks
the gradients by the descent that each promises on a small batch, minus a penalty on its size, and leaves out the worst.

All of it is one JAX function of whole arrays in which a leading dimension stands for the replicas. `diffshard.search`
plans it like any other step: replicas lie along a mesh axis, other axes split the model within each replica, and only
the mean travels between replicas, as in plain data parallelism.

What is noticed is a wrong gradient, whatever made it: bad data, an error in a computation, a worker that lies. What is
not noticed is an error after the gradients were compared, such as in the mean or in the optimiser, and a device that
computes its score as wrongly as its gradient.

Letters for sizes: N replicas, B examples of a batch.

Source: Xie, Koyejo, Gupta, "Zeno: Distributed Stochastic Gradient Descent with Suspicion-based Fault-tolerance" (ICML
2019), definitions 2 (the score) and 3 (the mean of the gradients with the highest scores).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cost.real_numbers import Count, checked_number, real_number, whole_number

Params = Any
Batch = Any
LossFn = Callable[[Params, Batch], jax.Array]
"""`loss_fn(params, batch)` is a scalar, the mean over the batch."""

PENALTY_SHARE = 0.1
"""The default penalty, as a share of the step size. With it a multiple of the true gradient ranks below the gradient
itself from 9 times on."""


MOST_DEVIATION = 3.0
"""The most that one score may change a standing, in median deviations from the median of its step."""
OUTLIER_SPREADS = 8.0
"""How far a score may lie below the best ones, in their spreads. Below that, no standing keeps its replica."""


class ZenoReport(NamedTuple):
    """A report on each replica's gradient; for a log, and `standings` for the next step.

    Attributes:
      scores: `[N]` float32, the promised descent of the loss less the penalty; `-inf` for a gradient that is not finite
        or makes the loss so.
      kept: `[N]` truth values, whether a replica's gradient is part of the mean.
      standings: `[N]` float32, how far a replica's scores are above the median, in median deviations, summed over the
        steps with less weight for older ones.
    """

    scores: jax.Array
    kept: jax.Array
    standings: jax.Array


class ZenoResult(NamedTuple):
    """The result of a function that `zeno` made.

    Attributes:
      loss: a scalar, the mean of the losses of the replicas that were kept; NaN if none was.
      gradients: as the parameters, the mean over the replicas that were kept; zeros if none was.
      report: what became of each replica.
    """

    loss: jax.Array
    gradients: Params
    report: ZenoReport


def zeno(
    loss_fn: LossFn,
    *,
    num_replicas: int,
    num_dropped: int,
    step_size: float | jax.Array,
    penalty: float | jax.Array | None = None,
    memory: float = 0.0,
) -> Callable[..., ZenoResult]:
    """Makes a function like `jax.value_and_grad(loss_fn)` whose gradients leave out the most suspicious replicas.

    >>> gradients_of = diffshard.robust_gradients.zeno(loss_fn, num_replicas=8, num_dropped=2, step_size=1e-3)
    >>> loss, gradients, report = gradients_of(params, batch, check_batch)

    The batch is divided into equal parts, one for each replica. `check_batch` is other data that everyone trusts; an
    eighth of a replica's part is usually enough. Use a new one at each step.

    Args:
      loss_fn: `loss_fn(params, batch)`, a scalar that is a mean over the batch.
      num_replicas: N, usually the size of the mesh axis for data; it must divide the leading dimension of a batch.
      num_dropped: the number of replicas that are left out at each step: at least as many as may be faulty at once.
      step_size: how far the score walks along a gradient: about as far as the optimiser would, such as the learning
        rate of plain gradient descent. It may be traced.
      penalty: the weight of a gradient's squared norm in its score; None takes a tenth of the step size.
      memory: the share of a replica's standing that stays from step to step, from 0 to below 1. With 0 a step's scores
        alone decide, as in the paper. Late in training these are mostly noise, and a replica that is wrong at every
        step, such as by a sign, is known by its scores of many steps; 0.95 remembers about twenty. Then carry the
        standings: `gradients_of(params, batch, check_batch, standings)`, zeros at first, then those of the report.

    Returns:
      `(params, batch, check_batch, standings=None) -> ZenoResult`.

    Raises:
      TypeError: `loss_fn` is not a function.
      ValueError: a number breaks its rule; or, when the result is called, a batch cannot be divided.
    """
    _check_loss_fn(loss_fn)
    _check_counts(num_replicas, num_dropped)
    _check_prices(step_size, penalty)
    _check_memory(memory)
    losses_and_gradients = replica_gradients(loss_fn, num_replicas)

    def robust_value_and_grad(
        params: Params, batch: Batch, check_batch: Batch, standings: jax.Array | None = None
    ) -> ZenoResult:
        losses, gradients = losses_and_gradients(params, batch)
        options = {"num_dropped": num_dropped, "step_size": step_size, "penalty": penalty, "memory": memory}
        mean, report = zeno_mean(loss_fn, params, gradients, check_batch, standings, **options)
        loss = jnp.where(jnp.any(report.kept), mean_of_kept(losses, report.kept), jnp.nan)
        return ZenoResult(loss, mean, report)

    return robust_value_and_grad


def replica_gradients(loss_fn: LossFn, num_replicas: int) -> Callable[[Params, Batch], tuple[jax.Array, Params]]:
    """Makes a function that returns each replica's loss `[N]` and gradients `[N, ...]` for its part of a batch.

    The parts are consecutive: replica i has examples `i * B/N` to `(i + 1) * B/N`, as a data axis splits a batch.

    Raises:
      TypeError: `loss_fn` is not a function.
      ValueError: `num_replicas` is not positive; or, when the result is called, it does not divide a batch.
    """
    _check_loss_fn(loss_fn)
    _check_counts(num_replicas, 0)

    def by_replica(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        parts = _divided(batch, num_replicas)
        return jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0))(params, parts)

    return by_replica


def zeno_mean(
    loss_fn: LossFn,
    params: Params,
    gradients: Params,
    check_batch: Batch,
    standings: jax.Array | None = None,
    *,
    num_dropped: int,
    step_size: float | jax.Array,
    penalty: float | jax.Array | None = None,
    memory: float = 0.0,
) -> tuple[Params, ZenoReport]:
    """Returns the mean of the gradients with the highest scores, and a report; `zeno` calls this.

    It is for gradients that `replica_gradients` made and something else changed on the way, such as clipping.

    Args:
      loss_fn: as in `zeno`.
      params: of the model.
      gradients: as `params`, with a leading dimension N of replicas.
      check_batch: data on which the gradients are tried; every replica tries on all of it.
      standings: `[N]` of the report before, with `memory`; None at first.
      num_dropped: as in `zeno`.
      step_size: as in `zeno`.
      penalty: as in `zeno`.
      memory: as in `zeno`.

    Raises:
      TypeError: `loss_fn` is not a function.
      ValueError: `gradients` are not those of several replicas, or a number breaks its rule.
    """
    _check_loss_fn(loss_fn)
    _check_prices(step_size, penalty)
    _check_memory(memory)
    num_replicas = _num_replicas(params, gradients)
    _check_counts(num_replicas, num_dropped)
    if standings is not None and jnp.shape(standings) != (num_replicas,):
        raise ValueError(f"`standings` must have the shape ({num_replicas},), not {jnp.shape(standings)}.")
    scores = _scores(loss_fn, params, gradients, check_batch, step_size, penalty)
    deviations = jnp.clip(_deviations(scores), -MOST_DEVIATION, MOST_DEVIATION)
    standings = deviations if standings is None else memory * standings + deviations
    ranked_by = scores if memory == 0 else _with_outliers_last(standings, scores, num_replicas - num_dropped)
    kept = _best(ranked_by, num_dropped)
    return mean_of_kept(gradients, kept), ZenoReport(scores, kept, standings)


def mean_of_kept(arrays: Any, kept: jax.Array) -> Any:
    """Returns the mean over the leading dimension of arrays `[N, ...]` where `kept` `[N]` is true; zeros without any.

    What is not kept may be NaN or infinite. Each array is one masked sum, so that devices send what a plain mean sends.
    """
    weight = 1 / jnp.maximum(jnp.sum(kept), 1)

    def mean(array: jax.Array) -> jax.Array:
        is_kept = kept.reshape(-1, *[1] * (array.ndim - 1))
        return jnp.sum(jnp.where(is_kept, array * weight.astype(array.dtype), 0), axis=0)

    return jax.tree.map(mean, arrays)


def _scores(
    loss_fn: LossFn,
    params: Params,
    gradients: Params,
    check_batch: Batch,
    step_size: float | jax.Array,
    penalty: float | jax.Array | None,
) -> jax.Array:
    """Returns the score of each replica (definition 2), `[N]`; `-inf` where it is not a finite number."""
    penalty = PENALTY_SHARE * step_size if penalty is None else penalty

    def loss_after(gradient: Params) -> jax.Array:
        moved = jax.tree.map(lambda p, g: (p - step_size * g).astype(p.dtype), params, gradient)
        return loss_fn(moved, check_batch).astype(jnp.float32)

    descent = loss_fn(params, check_batch).astype(jnp.float32) - jax.vmap(loss_after)(gradients)
    scores = descent - penalty * jax.vmap(_squared_norm)(gradients)
    return jnp.where(jnp.isfinite(scores), scores, -jnp.inf)


def _deviations(scores: jax.Array) -> jax.Array:
    """Returns how far each score is above the median, in median deviations from it, `[N]`; -inf where it is -inf.

    Where more than half of the scores are equal, the deviation is the mean one.
    """
    is_finite = jnp.isfinite(scores)
    median = jnp.nanmedian(jnp.where(is_finite, scores, jnp.nan))
    distance = jnp.where(is_finite, scores - median, 0.0)
    middle = jnp.nanmedian(jnp.where(is_finite, jnp.abs(distance), jnp.nan))
    mean = jnp.sum(jnp.abs(distance)) / jnp.maximum(jnp.sum(is_finite), 1)
    spread = jnp.where(middle > 0, middle, jnp.where(mean > 0, mean, 1.0))
    return jnp.where(is_finite, distance / spread, -jnp.inf)


def _with_outliers_last(standings: jax.Array, scores: jax.Array, num_best: int) -> jax.Array:
    """Returns numbers that rank replicas by their standings, `[N]`, but those with outlying scores by these, below."""
    ordered = jnp.sort(scores, descending=True)
    least = ordered[num_best - 1]
    spread = jnp.where(jnp.isfinite(least), ordered[0] - least, 0.0)
    below = (least - scores) / jnp.where(spread > 0, spread, 1.0)  # in spreads of the best scores
    is_outlier = (spread > 0) & (below > OUTLIER_SPREADS)
    ranks = jnp.where(is_outlier, jnp.min(standings) - below, standings)
    return jnp.where(jnp.isfinite(scores), ranks, -jnp.inf)


def _squared_norm(gradient: Params) -> jax.Array:
    return sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradient)), jnp.float32(0))


def _best(scores: jax.Array, num_dropped: int) -> jax.Array:
    """Returns which replicas are kept (definition 3), `[N]`: all but the lowest scores, and none that is `-inf`.

    A replica's rank is the number of replicas before it. Of equal scores the first one is before the others.
    """
    number = jnp.arange(len(scores))
    is_tied_before = (scores[None, :] == scores[:, None]) & (number[None, :] < number[:, None])
    rank = jnp.sum((scores[None, :] > scores[:, None]) | is_tied_before, axis=1)
    return (rank < len(scores) - num_dropped) & jnp.isfinite(scores)


def _divided(batch: Batch, num_replicas: int) -> Batch:
    """Returns a batch with each leading dimension B as `[N, B/N]`."""

    def divide(path: Any, array: Any) -> jax.Array:
        shape = jnp.shape(array)
        if not shape or shape[0] % num_replicas or not shape[0]:
            raise ValueError(
                f"`num_replicas` must divide the leading dimension of each array of the batch; got {num_replicas} and "
                f"`batch{jax.tree_util.keystr(path)}` of shape {shape}. Give a batch of another size."
            )
        return jnp.reshape(array, (num_replicas, shape[0] // num_replicas, *shape[1:]))

    if not jax.tree.leaves(batch):
        raise ValueError("`batch` must hold at least one array, got none.")
    return jax.tree_util.tree_map_with_path(divide, batch)


def _num_replicas(params: Params, gradients: Params) -> int:
    """Returns N of gradients `[N, ...]`."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    if jax.tree.structure(gradients) != treedef or not paths:
        raise ValueError(
            f"`gradients` must have the structure of `params`, {treedef}, and at least one array; it has "
            f"{jax.tree.structure(gradients)}."
        )
    arrays = jax.tree.leaves(gradients)
    num_replicas = (*jnp.shape(arrays[0]), 0)[0]
    for (path, parameter), array in zip(paths, arrays, strict=True):
        if jnp.shape(array) != (num_replicas, *jnp.shape(parameter)):
            raise ValueError(
                "`gradients` must have a leading dimension of replicas, the same for all, and then the shape of their "
                f"parameter; `{jax.tree_util.keystr(path)}` has {jnp.shape(array)} for {jnp.shape(parameter)}."
            )
    return num_replicas


def _check_loss_fn(loss_fn: Any) -> None:
    if not callable(loss_fn):
        raise TypeError(f"`loss_fn` must be a function, not {type(loss_fn).__name__}.")


def _check_counts(num_replicas: Any, num_dropped: Any) -> None:
    number, dropped = checked_number("num_replicas", num_replicas, Count), whole_number(num_dropped)
    if dropped is None or not 0 <= dropped < number:
        raise ValueError(
            f"`num_dropped` must be a whole number from 0 to {number - 1}, so that one of {number} replicas is kept, "
            f"not {num_dropped!r}."
        )


def _check_memory(memory: Any) -> None:
    share = real_number(memory)
    if share is None or not 0 <= share < 1:
        raise ValueError(f"`memory` must be a number from 0 to below 1, not {memory!r}.")


def _check_prices(step_size: Any, penalty: Any) -> None:
    """Checks what is a number; arrays may be traced and are taken as they are."""
    step, weight = real_number(step_size), real_number(penalty)
    if not isinstance(step_size, jax.Array) and (step is None or not 0 < step < float("inf")):
        raise ValueError(f"`step_size` must be a positive, finite number or a scalar array, not {step_size!r}.")
    if penalty is None or isinstance(penalty, jax.Array):
        return
    if weight is None or not 0 <= weight < float("inf"):
        raise ValueError(f"`penalty` must be a finite number, zero or more, a scalar array or None, not {penalty!r}.")
