"""A neural differential equation of Equinox and diffrax: an adaptive solver, differentiated through its checkpoints."""

import diffrax  # pyright: ignore[reportMissingImports]
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from experiments.zoo.base import TrainingStep

WIDTH = 64


class Field(eqx.Module):
    """The derivative of the state."""

    net: eqx.nn.MLP

    def __call__(self, t, y, args):
        """Returns dy/dt."""
        del t, args
        return self.net(y)


class NeuralODE(eqx.Module):
    """Solves the equation from a start, and returns the state at given times."""

    field: Field

    def __call__(self, times: jax.Array, start: jax.Array) -> jax.Array:
        """Returns the states `[times, features]`."""
        return diffrax.diffeqsolve(
            diffrax.ODETerm(self.field),
            diffrax.Tsit5(),
            t0=times[0],
            t1=times[-1],
            dt0=times[1] - times[0],
            y0=start,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=times),
            max_steps=64,
        ).ys


def make() -> TrainingStep:
    """Makes a neural ODE of 16 dimensions, on 32 random trajectories."""
    net = eqx.nn.MLP(
        16, 16, WIDTH, depth=2, activation=jax.nn.softplus, final_activation=jnp.tanh, key=jax.random.key(0)
    )
    model = NeuralODE(Field(net))
    optimizer = optax.adabelief(3e-3)

    def train_step(model, opt_state, times, trajectories):
        def loss_fn(model):
            predicted = jax.vmap(model, in_axes=(None, 0))(times, trajectories[:, 0])
            return jnp.mean((predicted - trajectories) ** 2)

        loss, gradients = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    times = jnp.linspace(0.0, 1.0, 8)
    trajectories = jax.random.normal(jax.random.key(1), (32, 8, 16))
    return TrainingStep(
        train_step, (model, optimizer.init(eqx.filter(model, eqx.is_array))), (times, trajectories), jit=eqx.filter_jit
    )
