"""A physics-informed network of plain functions: second derivatives of its output, L-BFGS with a line search."""

import jax
import jax.numpy as jnp
import optax

from experiments.zoo.base import TrainingStep

WIDTHS = (2, 64, 64, 64, 1)


def make() -> TrainingStep:
    """Makes a network that solves the heat equation, on 512 points inside and 64 on the boundary."""
    initialise = jax.nn.initializers.glorot_normal()
    keys = jax.random.split(jax.random.key(0), len(WIDTHS) - 1)
    params = [
        {"w": initialise(k, (a, b)), "b": jnp.zeros(b)} for k, a, b in zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    ]
    optimizer = optax.lbfgs(memory_size=5, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=8))

    def temperature(params, point):
        x = point
        for layer in params[:-1]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return (x @ params[-1]["w"] + params[-1]["b"])[0]

    def loss_fn(params, inside, boundary):
        def residual(point):
            hessian = jax.hessian(temperature, argnums=1)(params, point)
            return jax.grad(temperature, argnums=1)(params, point)[0] - 0.1 * hessian[1, 1]

        at_start = jnp.sin(jnp.pi * boundary[:, 1]) * (boundary[:, 0] == 0)
        fit = jax.vmap(temperature, in_axes=(None, 0))(params, boundary) - at_start
        return jnp.mean(jax.vmap(residual)(inside) ** 2) + jnp.mean(fit**2)

    def train_step(params, opt_state, inside, boundary):
        def value_fn(params):
            return loss_fn(params, inside, boundary)

        value, gradients = optax.value_and_grad_from_state(value_fn)(params, state=opt_state)
        updates, opt_state = optimizer.update(
            gradients, opt_state, params, value=value, grad=gradients, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), opt_state, value

    inside_key, boundary_key = jax.random.split(jax.random.key(1))
    inside = jax.random.uniform(inside_key, (512, 2))
    boundary = jax.random.uniform(boundary_key, (64, 2)).at[:32, 0].set(0.0).at[32:, 1].set(1.0)
    return TrainingStep(train_step, (params, optimizer.init(params)), (inside, boundary))
