"""Networks that predict the seconds of a set of elements: elements are embedded, and their weighted mean is priced.

    seconds = Σ_i w_i · unit · softplus(head(Σ_i w_i element(x_i) / Σ_i w_i))

for elements with features x_i and work w_i; `element` has layers F → 128 → 32 and `head` 32 → 64 → 1. So a set of any
size has a price that does not depend on an order, and that needs no more than a sum where an element is added or taken
away. The work is what a simple formula says; the network learns how long a unit of it takes among the other elements.

Letters for sizes: N sets, M elements of a set at most, F features.

Source: the layers and the pooling are those of Zha et al., "NeuroShard" (MLSys 2023), section 3.2. They pool sums
without weights, for which hundreds of samples in place of their hundred thousand are too few.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike

HIDDEN, EMBEDDED, HEAD = 128, 32, 64
_STEPS, _RATE, _WEIGHT_DECAY = 1000, 1e-3, 1.0  # chosen by hand, on samples that no published error is from

_MOST_DEVIATIONS = 3.0
"""Standard deviations at which features end, so that only the work, and not its rate, is extrapolated."""


class PooledNetwork(NamedTuple):
    """A trained network. The first feature of an element is the logarithm of its work.

    Attributes:
      centre: subtracted from features, `[F]`.
      scale: that they are divided by then, `[F]`.
      weights: of the four layers, `[F, 128]`, `[128, 32]`, `[32, 64]`, `[64, 1]`.
      biases: of the four layers, `[128]`, `[32]`, `[64]`, `[1]`.
      unit_s: seconds of one unit of work, about.
    """

    centre: np.ndarray
    scale: np.ndarray
    weights: tuple[np.ndarray, ...]
    biases: tuple[np.ndarray, ...]
    unit_s: float

    def embeddings(self, features: ArrayLike) -> np.ndarray:
        """Returns the terms of sums, `[..., 65]`, from features `[..., F]`: inputs of the head, and work."""
        features = np.asarray(features, float)
        work = np.exp(features[..., :1])
        x = np.clip((features - self.centre) / self.scale, -_MOST_DEVIATIONS, _MOST_DEVIATIONS)
        hidden = np.maximum(x @ self.weights[0] + self.biases[0], 0)
        inputs = (hidden @ self.weights[1] + self.biases[1]) @ self.weights[2] + self.biases[2]
        return np.concatenate([work * inputs, work], axis=-1)

    def seconds(self, sums: np.ndarray) -> np.ndarray:
        """Returns the seconds of sets, `[...]`, from sums of embeddings `[..., 65]`; 0 for no elements."""
        work = sums[..., -1]
        means = sums[..., :-1] / np.maximum(work, np.finfo(np.float32).tiny)[..., None]
        output = np.maximum(means, 0, out=means) @ self.weights[3][:, 0] + self.biases[3][0]
        return np.maximum(work, 0) * self.unit_s * np.logaddexp(0, output)


def check_network(network: PooledNetwork, num_features: int) -> None:
    """Checks that a network, which may be from a file, has layers that fit each other, of numbers that can be.

    Raises:
      ValueError: names the part and the rule.
    """
    sizes = (num_features, HIDDEN, EMBEDDED, HEAD, 1)
    expected = {"centre": (num_features,), "scale": (num_features,)}
    arrays = {"centre": network.centre, "scale": network.scale}
    for i, (own, inputs, outputs) in enumerate(zip(network.weights, sizes[:-1], sizes[1:], strict=True)):
        expected |= {f"weights.{i}": (inputs, outputs), f"biases.{i}": (outputs,)}
        arrays |= {f"weights.{i}": own, f"biases.{i}": network.biases[i]}
    for name, array in arrays.items():
        if array.shape != expected[name] or not np.issubdtype(array.dtype, np.floating):
            raise ValueError(f"`{name}` must be floats {expected[name]}, not {array.dtype} {array.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"`{name}` must be finite numbers")
    if not (network.scale > 0).all() or not 0 < network.unit_s < math.inf:
        raise ValueError("`scale` and `unit_s` must be positive")


def fit(features: Sequence[np.ndarray], seconds: np.ndarray, key: jax.Array) -> PooledNetwork:
    """Trains a network on measured sets, by the mean squared logarithm of its ratio to what was measured.

    Args:
      features: of the elements of each set, N arrays `[m, F]` with 1 to M elements.
      seconds: of each set, `[N]`, positive.
      key: of the first weights.
    """
    elements = np.concatenate(features)
    centre, scale = elements.mean(0), np.maximum(elements.std(0), 1e-3)
    work_of_sets = np.array([np.exp(own[:, 0]).sum() for own in features])
    unit_s = float(np.exp(np.log(seconds / work_of_sets).mean()))
    padded = np.zeros((len(features), max(map(len, features)), elements.shape[1]), np.float32)
    shares = np.zeros(padded.shape[:2], np.float32)
    for i, (own, work) in enumerate(zip(features, work_of_sets, strict=True)):
        padded[i, : len(own)] = np.clip((own - centre) / scale, -_MOST_DEVIATIONS, _MOST_DEVIATIONS)
        shares[i, : len(own)] = np.exp(own[:, 0]) / work
    sizes = (elements.shape[1], HIDDEN, EMBEDDED, HEAD, 1)
    parameters = [
        (jax.random.normal(k, (n, m)) * np.sqrt(2 / n), jnp.zeros(m))
        for k, n, m in zip(jax.random.split(key, 4), sizes[:-1], sizes[1:], strict=True)
    ]
    logarithms = np.log(seconds / work_of_sets / unit_s).astype(np.float32)
    trained = jax.device_get(_trained(parameters, padded, shares, logarithms))
    weights, biases = zip(*trained, strict=True)
    return PooledNetwork(centre, scale, weights, biases, unit_s)


@jax.jit
def _trained(parameters: Any, features: jax.Array, shares: jax.Array, logarithms: jax.Array) -> Any:
    optimizer = optax.adamw(optax.cosine_decay_schedule(_RATE, _STEPS), weight_decay=_WEIGHT_DECAY)

    def loss_fn(parameters: Any) -> jax.Array:
        first, second, third, last = parameters
        embedded = jax.nn.relu(features @ first[0] + first[1]) @ second[0] + second[1]
        means = jnp.einsum("nme,nm->ne", embedded, shares)
        output = (jax.nn.relu(means @ third[0] + third[1]) @ last[0] + last[1])[:, 0]
        return jnp.mean((jnp.log(jax.nn.softplus(output) + 1e-6) - logarithms) ** 2)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        parameters, state = carry
        updates, state = optimizer.update(jax.grad(loss_fn)(parameters), state, parameters)
        return (optax.apply_updates(parameters, updates), state), None

    return jax.lax.scan(step, (parameters, optimizer.init(parameters)), None, length=_STEPS)[0][0]
