"""Embedding tables on devices: `shard_tables` in `search.py` plans, `TablePlan` in `plan.py` runs.

Planning: `solving.py` chooses the search; `annealing.py` with `chains.py` is the default one, `enumeration.py` that of
few placements, and `bound.py` the lower bound. `learning.py` measures (`samples.py`, `measurements.py`) and trains a
`LearnedTableCost`, and `learned_annealing.py` searches with it.

Running: `layout.py` says where each piece of a table lies in the arrays of its device (`arrays.py`). The programs of
all devices are `lookup_programs.py` and `update_programs.py`, with what they send in `exchanges.py` and their rows in
`device_rows.py` and `host_rows.py`. `reference.py` has the operations on one table.
"""
