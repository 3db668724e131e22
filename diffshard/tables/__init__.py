"""Embedding tables on devices: `shard_tables` plans which device holds which rows and columns, and the plan runs.

>>> tables = [diffshard.tables.EmbeddingTable("users", 1_000_000, 64, 20.0)]
>>> plan = diffshard.tables.shard_tables(tables, mesh, batch_size=4096)
>>> arrays = plan.init(jax.random.key(0))
>>> pooled = plan.lookup(arrays, {"users": ids})["users"]

`shard_tables` is in `search.py`, `TablePlan` in `plan.py`.

Planning: `solving.py` has the default search, with `chains.py`, and chooses it or another solver, and `bound.py` has
the lower bound and the enumeration of few placements. `measurements.py` measures and trains a `LearnedTableCost`, and
`learned_annealing.py` searches with it.

Running: `layout.py` says where each piece of a table lies in the arrays of its device (`arrays.py`). The programs of
all devices are in `programs.py`, with what they send in `exchanges.py`, rows in memory of hosts in `host_rows.py`, and
rows of which each host has a copy in `each_host.py`. `hot_rows.py` finds the rows that are looked up most often, and
numbers them first.
"""

from typing import TYPE_CHECKING

from diffshard.public_names import lazy_names

if TYPE_CHECKING:
    from diffshard.tables.arrays import padded_ids as padded_ids
    from diffshard.tables.hot_rows import TableStatistics as TableStatistics
    from diffshard.tables.learned_cost import LearnedTableCost as LearnedTableCost
    from diffshard.tables.measurements import host_table_cost as host_table_cost
    from diffshard.tables.measurements import learn_table_cost as learn_table_cost
    from diffshard.tables.plan import TablePlan as TablePlan
    from diffshard.tables.search import shard_tables as shard_tables
    from search_spaces.embedding_tables.base import EmbeddingTable as EmbeddingTable

__getattr__, __dir__, __all__ = lazy_names(__name__)
