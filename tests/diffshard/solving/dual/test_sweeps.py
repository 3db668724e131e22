"""Sweeps: edges that share a matrix are computed together, and give what each by itself gives."""

import numpy as np
import pytest

from diffshard.solving.csr import to_csr
from diffshard.solving.dual import sweeps
from diffshard.solving.dual.sweeps import lay_out, sweep
from experiments.layered import layered_problem


def test_edges_of_one_matrix_store_it_once_and_give_the_same_bound(monkeypatch):
    csr = to_csr(layered_problem(0, 4, width=12, most=5))
    results = []
    for least_rows in (1, 1 << 60):
        monkeypatch.setattr(sweeps, "_LEAST_EQUAL_ROWS", least_rows)
        layout = lay_out(csr, np.float64)
        messages = np.zeros(layout.num_messages + 1)
        results.append([sweep(layout, csr.cost, messages) for _ in range(5)])
        groups = [group for groups in layout.up + layout.down for group in groups]
        stored = sum(group.matrix.size for group in groups)
        of_edges = (csr.sizes[csr.source] * csr.sizes[csr.target]).sum()
        assert stored < 0.5 * of_edges if least_rows == 1 else stored >= of_edges
    for (bound, absorbed), (same_bound, same_absorbed) in zip(*results, strict=True):
        assert bound == pytest.approx(same_bound, rel=1e-12)
        assert absorbed == pytest.approx(same_absorbed, abs=1e-12)
