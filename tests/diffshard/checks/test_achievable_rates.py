"""The rates that programs reach, and the links that a group of devices takes."""

import pytest

from cost.presets import preset
from diffshard.checks.kernel_work import BETWEEN_HOSTS, INSIDE_HOST, achievable_rates


def test_achievable_rates_are_shares_of_the_datasheets():
    rates = achievable_rates(preset("h100", {"data": 4, "model": 8}))
    assert rates.kernel_s({"bfloat16": 989e12}, 0) == pytest.approx(1e-6 + 1 / 0.7)
    assert rates.kernel_s({}, 3350e9) == pytest.approx(1e-6 + 1 / 0.8)
    inside = [list(range(8 * host, 8 * host + 8)) for host in range(4)]
    between = [list(range(device, 32, 8)) for device in range(8)]
    assert rates.links(inside) == (INSIDE_HOST,)
    assert rates.links(between) == (BETWEEN_HOSTS,)
    assert rates.links([list(range(32))]) == (INSIDE_HOST, BETWEEN_HOSTS)
    assert rates.collective_s("all_gather", 8e9, inside) == pytest.approx(7e9 / 360e9, rel=1e-2)
    assert rates.collective_s("all_gather", 4e9, between) == pytest.approx(3e9 / 45e9, rel=1e-2)
    assert rates.collective_s("all_gather", 32e9, [list(range(32))]) == pytest.approx(31e9 / 360e9, rel=1e-2)
    assert rates.collective_s("all_gather", 4e9, [[0, 4, 8, 12]]) == pytest.approx(3e9 / 90e9, rel=1e-2)
