"""What to rent: the offer with most steps for the money and the fastest one, with bounds, on steps worked by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost.base import Hardware, Link
from cost.clusters import Cluster, Hosts
from diffshard import InfeasibleError
from diffshard.base import Deadline
from diffshard.renting import Offer, rent

FREE = Link(0.0, 0.0)


def devices(count: int, flops_per_s: float, memory_bytes: float = 1e12) -> Cluster:
    """Devices of one host that only compute: links and memory cost nothing."""
    device = Hardware("device", flops_per_s, math.inf, memory_bytes, {})
    return Cluster([Hosts(count, 1, device)], inside=FREE, between=FREE)


def product(x, w):
    return x @ w


ARGUMENTS = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
FLOPS = 2 * 64 * 32 * 16


def test_seconds_and_prices_are_those_worked_by_hand():
    offers = [Offer("slow", devices(1, FLOPS / 4), 3.0), Offer("fast", devices(2, FLOPS / 4), 9.0)]
    rental = rent(product, offers, *ARGUMENTS, tokens_per_step=64)
    # One device takes 4 s, two take 2 s: 4/3600 of 3.00 is a third of a cent, 2/3600 of 9.00 half a cent.
    assert rental.cheapest.offer.name == "slow"
    assert rental.fastest.offer.name == "fast"
    assert rental.cheapest.step_s == pytest.approx(4.0)
    assert rental.fastest.step_s == pytest.approx(2.0)
    assert rental.cheapest.step_price == pytest.approx(4 * 3 / 3600)
    assert rental.fastest.step_price == pytest.approx(2 * 9 / 3600)
    assert "cheapest slow, 19.2k tokens for 1.00" in str(rental)
    assert "fastest  fast, 32 tokens/s" in str(rental)


def test_bounds_hold_for_all_offers():
    offers = [Offer("a", devices(1, FLOPS), 1.0), Offer("b", devices(4, FLOPS), 5.0)]
    rental = rent(product, offers, *ARGUMENTS)
    for one in rental.offers:
        assert one.lower_bound_s <= one.step_s
        assert one.least_step_price <= one.step_price
        assert rental.cheapest.step_price * (1 - rental.price_gap) <= one.least_step_price + 1e-12
        assert rental.fastest.step_s * (1 - rental.time_gap) <= one.lower_bound_s + 1e-12
    assert rental.price_gap == pytest.approx(0.0, abs=1e-6)


def test_the_order_of_offers_does_not_matter():
    offers = [
        Offer("a", devices(1, FLOPS), 1.0),
        Offer("b", devices(4, FLOPS), 3.0),
        Offer("c", devices(2, FLOPS), 9.0),
    ]
    names = [[one.offer.name for one in rent(product, order, *ARGUMENTS).offers] for order in (offers, offers[::-1])]
    assert names == [["b", "a", "c"]] * 2


def test_an_offer_without_memory_is_told_and_the_others_are_planned():
    offers = [Offer("small", devices(1, FLOPS, memory_bytes=100.0), 0.01), Offer("large", devices(1, FLOPS), 1.0)]
    rental = rent(product, offers, *ARGUMENTS)
    small = rental.offers[-1]
    assert rental.cheapest.offer.name == "large"
    assert (small.plan, small.status, small.step_s, small.lower_bound_s) == (None, "infeasible", math.inf, math.inf)
    assert rental.price_gap == pytest.approx(0.0, abs=1e-6)  # what is proven impossible is not a cheaper bound
    assert "small: No plan was found" in str(rental)
    with pytest.raises(ValueError, match="`name` must be that of an offer with a plan"):
        rental.step("small")


def test_nothing_fits():
    offers = [Offer(name, devices(1, FLOPS, memory_bytes=100.0), 1.0) for name in ("one", "other")]
    with pytest.raises(InfeasibleError, match=r"on any of 2 offers\. one: .*needs at least.*other: ") as caught:
        rent(product, offers, *ARGUMENTS)
    assert caught.value.is_proven


def test_offers_without_time_are_not_tried_and_bound_nothing(monkeypatch):
    monkeypatch.setattr(Deadline, "is_over", lambda deadline, share=1.0: deadline.limit_s is not None)
    offers = [Offer("first", devices(1, FLOPS), 1.0), Offer("second", devices(1, FLOPS), 1.0)]
    rental = rent(product, offers, *ARGUMENTS, time_limit_s=30.0)
    assert [one.status for one in rental.offers][-1] == "not tried"
    assert rental.price_gap == 1.0
    assert rental.time_gap == 1.0


def test_options_of_search_hold_for_all_offers():
    offers = [Offer("a", devices(1, FLOPS), 1.0)]

    def step(state, batch):
        return state + jnp.sum(batch), jnp.mean(batch)

    state, batch = jax.ShapeDtypeStruct((), "float32"), jax.ShapeDtypeStruct((8,), "float32")
    plan = rent(step, offers, state, batch, donate_argnums=0).cheapest.plan
    assert plan is not None
    assert plan.donate_argnums == (0,)


def test_the_planned_function_of_an_offer_runs_on_devices_that_are_here():
    here = Cluster.from_devices(
        jax.devices()[:2], hardware=Hardware("device", 1e9, math.inf, 1e12, {}), inside=FREE, between=FREE
    )
    rental = rent(product, [Offer("here", here, 1.0)], *ARGUMENTS)
    x, w = np.ones((64, 32), np.float32), np.full((32, 16), 0.5, np.float32)
    np.testing.assert_allclose(rental.step()(x, w), x @ w)


@pytest.mark.parametrize(
    ("name", "cluster", "price", "message"),
    [
        ("a", Hosts(1, 1, "h100"), 0.0, "`Offer.price_per_hour` of 'a' must be a positive number, not 0.0"),
        ("a", Hosts(1, 1, "h100"), -3, "must be a positive number, not -3"),
        ("a", Hosts(1, 1, "h100"), None, "must be a positive number, not None"),
        ("a", Hosts(1, 1, "h100"), math.inf, "must be a positive number, not inf"),
        ("a", Hosts(1, 1, "h100"), "3", "must be a positive number, not '3'"),
        ("a", 8, 3.0, "`Offer.cluster` of 'a' must be"),
        ("", Hosts(1, 1, "h100"), 3.0, "`Offer.name` must be text"),
    ],
)
def test_an_offer_that_breaks_a_rule(name, cluster, price, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Offer(name, cluster, price)


def test_unknown_hardware():
    with pytest.raises(ValueError, match="`hardware` 'h1000' is unknown; there are"):
        Offer("a", Hosts(1, 1, "h1000"), 3.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offers": []}, "`offers` must be one or more"),
        ({"offers": [3]}, "`offers` must be one or more"),
        ({"offers": [Offer("a", devices(1, 1.0), 1.0)] * 2}, "`offers` must have different names, not a, a"),
        ({"devices": 8}, "`devices` is no argument of `rent`: the devices are those of the offers"),
        ({"pipeline": "any"}, "`pipeline` is no argument of `rent`"),
        ({"tokens_per_step": 0}, "`tokens_per_step` must be a positive finite number"),
        ({"tokens_per_step": math.inf}, "`tokens_per_step` must be a positive finite number or None, not inf"),
        ({"time_limit_s": -1}, "`time_limit_s` must be a positive number"),
        ({"remat": "all"}, "`remat` must be"),
        ({"solver": "none of them"}, "none of them"),
    ],
)
def test_an_argument_that_breaks_a_rule(changes, message):
    offers = changes.pop("offers", [Offer("a", devices(1, 1.0), 1.0)])
    with pytest.raises((TypeError, ValueError), match=message):
        rent(product, offers, *ARGUMENTS, **changes)


def test_an_offer_of_several_kinds_is_refused():
    mixed = Cluster([Hosts(1, 8, "h100"), Hosts(1, 8, "a100")], between=FREE)
    with pytest.raises(
        ValueError, match=r"`Offer.cluster` of 'mixed' must have hosts of one kind, not of 2 \(8 x H100"
    ):
        Offer("mixed", mixed, 3.0)
