"""Boosted trees against brute force, and learned seconds of kernels beside laws, on made-up kernels."""

import itertools

import numpy as np
import pytest

from experiments import boosted_trees, learned_kernels
from experiments.learned_kernels import data_of, law, split, trees, trees_on
from tests.experiments.printed_tables import printed_rows

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


def product_rows(law_of=lambda m, n, k: (m + 60) * (n + 60) * (k + 120) * 2 / 250e12) -> list[dict]:
    sizes = itertools.product((512, 1024, 2048, 4096), (1024, 2048, 4096, 8192), (2048, 4096, 8192))
    return [
        {
            "kind": "gemm", "source": "aiconfigurator", "device": device, "m": m, "n": n, "k": k,
            "time_us": 1e6 * law_of(m, n, k) / speed,
        }
        for (m, n, k) in sizes
        for device, speed in ((A100, 1.0), (H100, 3.0))
    ]  # fmt: skip


def test_one_split_is_the_best_one_by_brute_force():
    rng = np.random.default_rng(0)
    features, targets = rng.integers(0, 8, (40, 3)).astype(float), rng.normal(size=40)
    found = boosted_trees.boosted(features, targets, 1, 1, rate=1.0, least_rows=3)
    least = min(
        sum(((part - part.mean()) ** 2).sum() for part in (targets[right], targets[~right]))
        for feature, cut in itertools.product(range(3), range(8))
        for right in [features[:, feature] > cut]
        if min(right.sum(), (~right).sum()) >= 3
    )
    assert ((found.predict(features) - targets) ** 2).sum() == pytest.approx(least)


def test_more_trees_fit_better_and_leaves_are_not_too_small():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(300, 2))
    targets = np.sin(3 * features[:, 0]) * features[:, 1]
    found = boosted_trees.boosted(features, targets, 3, 200, rate=0.2)
    errors = ((found.stages(features) - targets) ** 2).mean(1)
    assert (np.diff(errors) <= 1e-12).all()
    assert errors[-1] < 0.05 * targets.var()
    np.testing.assert_array_equal(found.stages(features)[-1], found.predict(features))
    few = boosted_trees.boosted(features[:5], targets[:5], 2, 3, rate=1.0)  # two leaves would need six rows
    np.testing.assert_allclose(few.predict(features), targets[:5].mean())


def test_a_fit_learns_less_noise_by_heart_than_many_deep_trees():
    rng = np.random.default_rng(2)
    features, others, noise = rng.normal(size=(200, 2)), rng.normal(size=(200, 2)), rng.normal(size=200)
    targets = 3 * np.sign(features[:, 0]) + noise
    many = boosted_trees.boosted(features, targets, 5, 400, rate=0.1)
    few = boosted_trees.fit(features, targets, np.random.default_rng(0))
    error, least = (np.square(t.predict(others) - 3 * np.sign(others[:, 0])).mean() for t in (many, few))
    assert least < 0.9 * error


@pytest.mark.parametrize("name", ["a third", "shapes", "larger", "another GPU"])
def test_nothing_is_fitted_to_what_is_held_out(name, monkeypatch):
    monkeypatch.setattr(boosted_trees, "MOST_TREES", 10)
    data = data_of(product_rows(), "products")
    fitted, wanted = split(data, name, 1)
    assert wanted.any()
    assert not (fitted & wanted).any()
    assert (data.device[wanted] == 1).all()
    assert set(data.device[fitted]) == ({0} if name == "another GPU" else {1})
    if name == "shapes":
        assert not set(data.group[fitted]) & set(data.group[wanted])
    if name == "larger":
        assert data.roofline_s[fitted].max() < data.roofline_s[wanted].min()
    changed = data.kernels.seconds.copy()
    changed[wanted] *= 7
    other = data._replace(kernels=data.kernels._replace(seconds=changed))
    for way in (trees, trees_on(trees)):
        np.testing.assert_array_equal(way(data, fitted, wanted), way(other, fitted, wanted))


def test_a_law_finds_what_follows_it_and_trees_correct_what_does_not():
    data = data_of(product_rows(), "products")
    fitted, wanted = split(data, "a third", 0)
    by_law = law("products")
    np.testing.assert_allclose(by_law(data, fitted, wanted), data.kernels.seconds[wanted], rtol=0.02)
    # Of another GPU the law is that of this one, at the rate of its datasheet.
    only_a100, h100 = split(data, "another GPU", 1)
    predicted = by_law(data, only_a100, h100)
    ratio = predicted / data.kernels.seconds[h100]
    assert ratio.max() / ratio.min() < 1.05

    odd = data_of(product_rows(lambda m, n, k: 2 * m * n * k / (250e12 if n > 1500 else 125e12)), "products")
    error, corrected = (
        np.abs(way(odd, fitted, wanted) / odd.kernels.seconds[wanted] - 1).mean() for way in (by_law, trees_on(by_law))
    )
    assert corrected < 0.5 * error


def test_a_row_for_each_gpu_and_split(capsys, monkeypatch):
    monkeypatch.setattr(boosted_trees, "MOST_TREES", 10)
    monkeypatch.setattr(learned_kernels, "read", lambda name: product_rows())
    learned_kernels.main(["--kinds", "products", "--splits", "a third", "larger"])
    rows = [row for row in printed_rows(capsys.readouterr().out) if row[0] == "products"]
    assert [tuple(row[1:3]) for row in rows] == [
        ("a third", "a100"), ("a third", "h100"), ("larger", "a100"), ("larger", "h100"),
    ]  # fmt: skip
    assert all(row[4].count("%") == 2 for row in rows)
