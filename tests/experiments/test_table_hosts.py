"""The experiment on tables on several hosts: bytes that leave hosts by hand, and its table."""

import numpy as np
import pytest

from experiments.embedding_tables import hosts
from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, Piece
from tests.experiments.printed_tables import printed_rows


def test_bytes_that_leave_hosts_by_hand():
    devices, table = hosts.hosts_of(2), EmbeddingTable("t", 1000, 128, 3.0)
    assert (devices.num_devices, devices.num_hosts) == (16, 2)

    def far(*pieces: Piece) -> float:
        return hosts.far_bytes([table], pieces, devices)

    pooled = 2 * 65536 * 128 * 4 / 2  # rows there, and their gradients back
    assert far(Piece(0, 3, 0, 1000, 0, 128)) == pytest.approx(pooled)
    # Half of the gradient of a copy goes to the other host and comes back, whatever devices of a host have a part.
    gradient = 2 * 2 * 1000 * 128 * 4 / 2
    assert far(Piece(0, EVERY_DEVICE, 0, 1000, 0, 128)) == pytest.approx(gradient)
    assert far(Piece(0, 1, 0, 1000, 0, 128, on_each_host=True)) == pytest.approx(gradient)


def test_plans_that_know_both_links_are_the_fastest_by_their_prices(capsys):
    hosts.main(["--hosts", "2", "--tasks", "0"])
    rows = printed_rows(capsys.readouterr().out)
    assert [row[2] for row in rows] == [hosts.ONE, hosts.TWO, hosts.OURS]
    one, two, ours = (float(row[3]) for row in rows)
    assert ours < two < one
    far = np.array([float(row[6]) for row in rows])
    assert far.argmin() == 2
