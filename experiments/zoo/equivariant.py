"""An equivariant network of e3nn: spherical harmonics and tensor products along the edges of point clouds."""

import e3nn_jax as e3nn  # pyright: ignore[reportMissingImports]
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from experiments.zoo.base import TrainingStep

POINTS, NEIGHBOURS = 128, 8


class Convolution(nn.Module):
    """Sends features along edges, times harmonics of the edge's direction and a function of its length."""

    irreps: str

    @nn.compact
    def __call__(self, features, vectors, senders, receivers):
        """Returns the features of the points after one round of messages."""
        harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", vectors, normalize=True)
        messages = e3nn.tensor_product(e3nn.flax.Linear(features.irreps)(features)[senders], harmonics)
        lengths = e3nn.soft_one_hot_linspace(
            jnp.linalg.norm(vectors, axis=-1), start=0.0, end=3.0, number=8, basis="gaussian", cutoff=False
        )
        weights = e3nn.flax.MultiLayerPerceptron((64, messages.irreps.num_irreps), jax.nn.silu)(lengths)
        summed = e3nn.scatter_sum(messages * weights, dst=receivers, output_size=POINTS) / NEIGHBOURS**0.5
        return e3nn.gate(e3nn.flax.Linear(e3nn.Irreps(self.irreps))(summed))


class Network(nn.Module):
    """Two convolutions and a sum over the points."""

    @nn.compact
    def __call__(self, positions, senders, receivers):
        """Returns the energy of a point cloud."""
        vectors = positions[receivers] - positions[senders]
        features = e3nn.IrrepsArray("1x0e", jnp.ones((POINTS, 1)))
        for _ in range(2):
            features = Convolution("32x0e + 16x0e + 8x1o + 8x2e")(features, vectors, senders, receivers)
        return e3nn.flax.Linear("0e")(features).array.sum()


def make() -> TrainingStep:
    """Makes a network that fits energies and forces of 4 random point clouds."""
    model = Network()
    optimizer = optax.adam(1e-3, eps=1e-6)

    def train_step(params, opt_state, positions, edges, targets):
        def loss_fn(params):
            def energy(positions, edges):
                return model.apply(params, positions, edges[0], edges[1])

            energies, gradients = jax.vmap(jax.value_and_grad(energy))(positions, edges)
            return jnp.mean((energies - targets["energy"]) ** 2) + jnp.mean((gradients + targets["force"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    keys = jax.random.split(jax.random.key(0), 5)
    positions = jax.random.normal(keys[0], (4, POINTS, 3))
    edges = jax.random.randint(keys[1], (4, 2, POINTS * NEIGHBOURS), 0, POINTS)
    edges = edges.at[:, 1].set((edges[:, 0] + 1 + edges[:, 1] % (POINTS - 1)) % POINTS)  # none to itself
    targets = {
        "energy": jax.random.normal(keys[2], (4,)),
        "force": jax.random.normal(keys[3], (4, POINTS, 3)),
    }
    params = model.init(keys[4], positions[0], edges[0, 0], edges[0, 1])
    return TrainingStep(train_step, (params, optimizer.init(params)), (positions, edges, targets))
