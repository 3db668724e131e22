"""A recommendation model: embedding tables of uneven size, pairwise interactions, two small MLPs; adamw.

Source: Naumov et al., DLRM (arXiv:1906.00091), figure 1.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from experiments.models.model import Model, State, gradient_step

DENSE_FEATURES = 13


class DLRM(nn.Module):
    """Clicks from dense and categorical features."""

    rows: Sequence[int]
    width: int

    @nn.compact
    def __call__(self, dense, categories):
        """Returns logits `[B]` from dense features `[B, 13]` and a category for each table, `[B, T]` integers."""
        bottom = nn.relu(nn.Dense(4 * self.width, name="bottom_0")(dense))
        bottom = nn.relu(nn.Dense(self.width, name="bottom_1")(bottom))
        looked_up = [
            nn.Embed(rows, self.width, name=f"table_{index}")(categories[:, index])
            for index, rows in enumerate(self.rows)
        ]
        vectors = jnp.stack([bottom, *looked_up], axis=1)
        products = jnp.einsum("btm,bsm->bts", vectors, vectors)
        above, below = jnp.triu_indices(vectors.shape[1], 1)
        top = jnp.concatenate([bottom, products[:, above, below]], axis=-1)
        top = nn.relu(nn.Dense(4 * self.width, name="top_0")(top))
        return nn.Dense(1, name="top_1")(top)[:, 0]


def make(*, rows: Sequence[int] = (4096, 1000, 509, 64, 64, 24, 8, 3), width: int = 16, batch: int = 64) -> Model:
    """Makes a DLRM training step with a table of each of `rows` rows; some do not divide by any mesh."""
    network = DLRM(tuple(rows), width)
    optimizer = optax.adamw(1e-3)

    def init(key: jax.Array) -> State:
        categories = jnp.zeros((1, len(rows)), jnp.int32)
        params = network.init(key, jnp.zeros((1, DENSE_FEATURES)), categories)["params"]
        return State(params, optimizer.init(params))

    def loss(params, statistics, batch):
        logits = network.apply({"params": params}, batch["dense"], batch["categories"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["click"]).mean(), statistics

    def make_batch(key: jax.Array) -> dict[str, jax.Array]:
        dense_key, category_key, click_key = jax.random.split(key, 3)
        return {
            "dense": jax.random.normal(dense_key, (batch, DENSE_FEATURES)),
            "categories": jax.random.randint(category_key, (batch, len(rows)), 0, jnp.asarray(rows)),
            "click": jax.random.bernoulli(click_key, 0.3, (batch,)).astype(jnp.float32),
        }

    return Model(f"dlrm-{len(rows)}", gradient_step(loss, optimizer), init, make_batch)
