"""How the validation loss reaches the rows of the choice: an `Estimator` each, and the unrolled step of order 2.

An estimator says how training runs during the search and by how much the rows increase the loss. A new one is a
function `increase(space, params, batch, rows, key, moment)`, handed to `bilevel(estimator=...)`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from diffshard.bilevel_search.space import Batch, Params, Rows, Selection, Space, one_hot, reference_choice


class Moment(NamedTuple):
    """Where training stands.

    Attributes:
      step: how many steps were taken, an integer scalar.
      step_sizes: as `params`: how far a unit of each gradient moves its parameter in all.
    """

    step: jax.Array
    step_sizes: Params


Increase = Callable[[Space, Params, Batch, Rows, jax.Array, Moment], jax.Array]
"""`increase(space, params, batch, rows, key, moment)`: a scalar in units of the loss, over the exact choice; it is
differentiated with respect to `rows`, and with `order=2` to `params`."""


class Estimator(NamedTuple):
    """How training runs during the search, and how the loss depends on the rows.

    Attributes:
      increase: see `Increase`.
      running: what training runs, made of rows and a key; None is the exact choice.
      weights: the same as weights that the rows can be differentiated through, for `order=2`.
      needs: the method that the space must have.
    """

    increase: Increase
    running: Callable[[Rows, jax.Array], Selection] | None = None
    weights: Callable[[Rows, jax.Array], Rows] | None = None
    needs: str = "loss"


def curvature() -> Estimator:
    """Σ_v ⟨p_v, damages_v⟩: the space's second-order loss_increases, linear in the rows, at exactly trained parameters.

    Damages of results are ½ E[(g·e)²]: the mean of g gᵀ stands for the Hessian, as it may for log-likelihoods
    (cross-entropy). Of other losses, such as a mean square, they can be far too small: they rank strategies, but only
    training (`prove`) can keep a bound. Damages of noisy gradients are ¼ Σ η e², with η the optimiser's step sizes.
    """

    def increase(space: Space, params: Params, batch: Batch, rows: Rows, key: jax.Array, moment: Moment) -> jax.Array:
        loss_increases = jax.lax.stop_gradient(space.loss_increases(params, batch, key, **moment._asdict()))
        return sum((row @ damage for row, damage in zip(rows, loss_increases, strict=True)), start=jnp.zeros(()))

    return Estimator(increase, needs="loss_increases")


def mixture() -> Estimator:
    """Every strategy runs and results are mixed by the rows: continuous relaxation of operations.

    Source: Liu, Simonyan and Yang, "DARTS: Differentiable Architecture Search" (ICLR 2019), equation 2.
    """
    return Estimator(_mixed_increase, _as_they_are, _as_they_are, "mixed_loss")


def sampled(temperature: float = 1.0) -> Estimator:
    """One strategy of each node is drawn and its result goes on; slopes are those of the softened draw.

    Training runs the drawn strategies alone; validation runs all, as each one's result is part of the slope.

    Args:
      temperature: of the softened draw; lower is closer to the draw and noisier.

    Source: Jang, Gu and Poole, "Categorical Reparameterization with Gumbel-Softmax" (ICLR 2017), section 2.2.

    Raises:
      ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"`temperature` must be positive, got {temperature}.")

    def draw(rows: Rows, key: jax.Array) -> Rows:
        keys = jax.random.split(key, len(rows))
        return [_straight_through(row, k, temperature) for row, k in zip(rows, keys, strict=True)]

    def increase(space: Space, params: Params, batch: Batch, rows: Rows, key: jax.Array, moment: Moment) -> jax.Array:
        draw_key, run_key = jax.random.split(key)
        return _mixed_increase(space, params, batch, draw(rows, draw_key), run_key, moment)

    def drawn(rows: Rows, key: jax.Array) -> Selection:
        return [row.argmax() for row in draw(rows, key)]

    return Estimator(increase, drawn, draw, "mixed_loss")


ESTIMATORS: dict[str, Callable[[], Estimator]] = {"curvature": curvature, "mixture": mixture, "sampled": sampled}


def resolve(estimator: str | Estimator | Increase) -> Estimator:
    """An estimator of a name or of a function; the function's training runs the exact choice.

    Raises:
      ValueError: no estimator has this name.
    """
    if isinstance(estimator, Estimator):
        return estimator
    if callable(estimator):
        return Estimator(estimator)
    if not isinstance(estimator, str) or estimator not in ESTIMATORS:
        raise ValueError(f"`estimator` must be one of {', '.join(ESTIMATORS)}, or a function; got {estimator!r}.")
    return ESTIMATORS[estimator]()


def unrolled(
    increase: Callable[[Params, Rows], jax.Array],
    train_loss: Callable[[Params, Rows], jax.Array],
    move: Callable[[Params], Params],
    params: Params,
    rows: Rows,
    gradients: Params,
) -> tuple[jax.Array, Rows]:
    """The increase after the step that θ is about to take, and its slope in the rows through that step.

    With θ' = move(g(θ, p)), g = ∇θ L_train, the slope is ∂p L_val(θ', p) + ∂p ⟨g(θ, p), u⟩, u = (∂move/∂g)ᵀ ∇θ' L_val.
    For gradient descent u = -ξ ∇θ' L_val. The second term is a difference of two slopes of the training loss, taken at
    θ + εu and θ - εu.

    Source: Liu, Simonyan and Yang, "DARTS" (ICLR 2019), equations 7 and 8, ε = 0.01 / |u|; here for any optimiser.

    Args:
      increase: of parameters and rows.
      train_loss: of parameters and rows, whose gradient in the parameters is `gradients` at `params`.
      move: new parameters of gradients.
      params: θ.
      rows: p.
      gradients: g(θ, p).
    """
    ahead, pull_back = jax.vjp(move, gradients)
    value, (toward, slope) = jax.value_and_grad(increase, argnums=(0, 1))(ahead, rows)
    (direction,) = pull_back(toward)
    # The root in adam-like optimisers has no derivative where a gradient is exactly 0.
    direction = jax.tree.map(lambda u: jnp.where(jnp.isfinite(u), u, 0.0), direction)
    norm = optax.tree.norm(direction)
    size = 0.01 / jnp.where(norm > 0, norm, 1.0)
    slope_in_rows = jax.grad(train_loss, argnums=1)
    above = slope_in_rows(_shifted(params, size, direction), rows)
    below = slope_in_rows(_shifted(params, -size, direction), rows)
    return value, jax.tree.map(lambda s, a, b: s + (a - b) / (2 * size), slope, above, below)


def _shifted(params: Params, size: jax.Array, direction: Params) -> Params:
    return jax.tree.map(lambda p, u: p + (size * u).astype(p.dtype), params, direction)


def _as_they_are(rows: Rows, key: jax.Array) -> Rows:
    del key
    return rows


def _mixed_increase(
    space: Space, params: Params, batch: Batch, rows: Rows, key: jax.Array, moment: Moment
) -> jax.Array:
    problem = space.problem
    exact = one_hot(problem, reference_choice(space, problem))
    # The reference is a constant: what the choice does to the parameters must show in the loss, not cancel.
    reference = jax.lax.stop_gradient(space.mixed_loss(params, batch, exact, key, moment.step))
    return space.mixed_loss(params, batch, rows, key, moment.step) - reference


def _straight_through(row: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    noisy = jnp.log(jnp.maximum(row, 1e-20)) + jax.random.gumbel(key, row.shape)
    soft = jax.nn.softmax(noisy / temperature)
    hard = jax.nn.one_hot(noisy.argmax(), row.size)
    return hard + soft - jax.lax.stop_gradient(soft)
