"""Networks over sets: what they promise by their form, and that they learn."""

import jax
import numpy as np
import pytest

from cost.pooled_networks import PooledNetwork, fit


def _sets(count: int, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Draws sets whose elements have work, and a rate that depends on a second feature and on the others of the set."""
    rng = np.random.default_rng(seed)
    features = [rng.uniform((0, -1), (4, 1), (int(rng.integers(1, 6)), 2)) for _ in range(count)]
    seconds = []
    for own in features:
        work, rate = np.exp(own[:, 0]), 1 + 0.8 * (own[:, 1] > 0)
        seconds.append(1e-6 * (work @ rate) * (1 + 0.2 * (work @ own[:, 1]) / work.sum()))
    return features, np.array(seconds)


@pytest.fixture(scope="module")
def network() -> PooledNetwork:
    return fit(*_sets(300, 0), jax.random.key(0))


def test_it_predicts_sets_that_it_has_not_seen(network):
    features, seconds = _sets(100, 1)
    predicted = np.array([network.seconds(network.embeddings(own).sum(0)) for own in features])
    by_work = np.array([np.exp(own[:, 0]).sum() for own in features])
    by_work *= np.median(seconds / by_work)
    error, error_by_work = (np.median(np.abs(p / seconds - 1)) for p in (predicted, by_work))
    assert error < 0.08
    assert error < 0.4 * error_by_work


def test_seconds_depend_on_no_order_and_none_are_needed_for_no_elements(network):
    own = _sets(1, 2)[0][0].repeat(2, axis=0)
    own[:, 1] += np.linspace(0, 1, len(own))
    embedded = network.embeddings(own)
    assert network.seconds(embedded[::-1].sum(0)) == pytest.approx(network.seconds(embedded.sum(0)))
    assert network.seconds(np.zeros_like(embedded[0])) == 0
