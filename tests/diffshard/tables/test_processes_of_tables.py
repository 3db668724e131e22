"""Several processes place embedding tables together: the first one searches, and arguments that differ are an error."""

from tests.processes import run_processes

_PLACE = """
import numpy as np
import diffshard
from diffshard.tables import EmbeddingTable, TableStatistics, search, shard_tables
from diffshard.plans.json_values import to_json_values

mesh = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
tables = [EmbeddingTable(f"t{i}", 200 * (i + 1), 16, i + 1.0) for i in range(6)]
same = TableStatistics.measure(np.arange(40).reshape(10, 4) % 7)

def attempt(name, **options):
    try:
        return shard_tables(tables, mesh, hardware="a100", batch_size=64, **options)
    except Exception as error:
        print(name, type(error).__name__, str(error).replace(chr(10), " "), flush=True)

attempt("own statistics:", statistics={"t1": TableStatistics.measure(np.arange(40).reshape(10, 4) % (7 + process))})
attempt("own limit:", memory_limit_bytes=1e6 + process)
attempt("wrong in one:", batch_size_of_one=3) if process else attempt("wrong in one:")
attempt("too little:", memory_limit_bytes=64.0)

def not_here(*args, **options):
    raise AssertionError("only the first process searches")

search.solve_space = not_here if process else search.solve_space
plan = attempt("plan:", statistics={"t1": same}, time_limit_s=0.2 + process)
print("pieces:", to_json_values(plan.pieces), plan.lower_bound_s, flush=True)
whole = {t.name: np.arange(t.rows * 16, dtype=np.float32).reshape(t.rows, 16) for t in tables}
ids = {t.name: np.arange(8)[:, None] for t in tables}
rows = jax.jit(plan.lookup)(plan.shard(whole), ids)
right = all((part.data == whole[name][part.index]).all() for name in whole for part in rows[name].addressable_shards)
print("rows are right:", right, flush=True)
"""


def test_processes_place_the_same_tables_by_the_same_statistics(tmp_path):
    outputs = [output.stdout for output in run_processes(_PLACE, 2, tmp_path, devices_each=2)]
    for output in outputs:
        assert "own statistics: ProcessesError The processes cannot place embedding tables: `statistics`" in output
        assert "own limit: ProcessesError The processes cannot place embedding tables: the devices" in output
        assert "too little: InfeasibleError Table" in output
        assert "rows are right: True" in output
    assert "wrong in one: TypeError" in outputs[1]
    assert "wrong in one: ProcessesError" in outputs[0]
    first, other = (next(line for line in out.splitlines() if line.startswith("pieces:")) for out in outputs)
    assert first == other
