"""Plans fit the memory with arrays that are as long on each device as on the fullest one, as they are when they run."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from cost.base import Hardware
from diffshard import InfeasibleError
from diffshard.tables import EmbeddingTable, shard_tables
from diffshard.tables.layout import Layout, check_fits, layout_of
from diffshard.tables.solving import solve_space
from search_spaces.embedding_tables.base import TableDevices
from search_spaces.embedding_tables.prices import piece_bytes
from search_spaces.embedding_tables.space import EmbeddingTableSpace

HARDWARE = Hardware("example", 1e12, 1e9, 1e9, {}, host_memory_bytes_per_s=1e8)


def _tables(seed: int, count: int) -> list[EmbeddingTable]:
    """Tables of two dtypes; long ones are narrow, and some have hot rows."""
    rng = np.random.default_rng(seed)
    tables = []
    for i in range(count):
        columns = int(rng.choice([2, 4, 8, 64, 128]))
        rows = int(rng.integers(2_000, 8_000)) // columns + 20
        dtype = str(rng.choice(["float32", "bfloat16"]))
        access = (6.0, 2.0, 1.0, 1.0) if rng.random() < 0.5 else None
        tables.append(EmbeddingTable(f"t{i}", rows, columns, float(rng.integers(1, 20)), dtype, access=access))
    return tables


def _needed(tables: list[EmbeddingTable]) -> int:
    return sum(piece_bytes(table, table.rows, table.dimension) for table in tables)


def _space(tables: list[EmbeddingTable], limit: float, num_devices: int, host: float | None = None):
    hosts = () if host is None else (host,) * num_devices
    return EmbeddingTableSpace(tables, TableDevices((HARDWARE,) * num_devices, (limit,) * num_devices, 1e-9, 16, hosts))


def _layout(space: EmbeddingTableSpace, choice) -> Layout:
    return layout_of(space.tables, space.decode(choice).pieces, space.devices)


@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("host", [None, 20_000.0])
def test_bytes_of_placements_are_those_of_their_arrays(host, num_hosts):
    """The search counts what `Layout` counts: numbers of two dtypes, state, copies, and rows on hosts by width."""
    space = _space(_tables(0, 7), 30_000.0, 4, host)
    space = EmbeddingTableSpace(space.tables, dataclasses.replace(space.devices, num_hosts=num_hosts))
    rng = np.random.default_rng(1)
    for _ in range(20):
        choice = [int(rng.integers(len(strategies))) for strategies in space.strategies]
        layout = _layout(space, choice)
        padded = space.arrays.padded(space.arrays.needed(np.array([choice])))[:, 0].tolist()
        assert padded == [layout.array_bytes(), *([] if host is None else [layout.host_array_bytes()])]
        assert (padded <= space.arrays.most()).all()


@pytest.mark.parametrize(("seed", "slack"), [(0, 1.06), (1, 1.06), (2, 1.2)])
def test_plans_near_the_limit_fit_as_they_run(seed, slack):
    """There is a plan whose arrays fit and can be made, of tables of two dtypes, some long and some wide."""
    tables, mesh = _tables(seed, 9), jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    limit = slack * _needed(tables) / 4
    plan = shard_tables(tables, mesh, hardware="a100", memory_limit_bytes=limit, batch_size=16)
    assert plan.predicted.device_bytes.max() <= plan.kept_bytes <= limit
    assert plan.lower_bound_s <= plan.step_s
    made = (*jax.tree.leaves(plan.init(jax.random.key(0))), *jax.tree.leaves(plan.init_state()))
    on_first = [shard.data.nbytes for x in made for shard in x.addressable_shards if shard.device == jax.devices()[0]]
    assert sum(on_first) == plan.kept_bytes


@pytest.mark.parametrize("solver", [None, "exhaustive", "gradient"])
@pytest.mark.parametrize("seed", range(4))
def test_a_placement_is_found_wherever_one_fits(seed, solver):
    """By brute force over all placements of three tables on two devices, at limits around the least possible one."""
    tables = _tables(seed, 3)
    space = _space(tables, np.inf, 2)
    choices = np.array(list(itertools.product(*(range(len(s)) for s in space.strategies))))
    padded = space.arrays.padded(space.arrays.needed(choices))[0]
    steps = np.array([space.step_s(choice) for choice in choices[np.argsort(padded)[:200]]])
    least = padded.min()
    for limit in (least - 1, least, 1.03 * least, 1.1 * least):
        limited = _space(tables, float(limit), 2)
        found = solve_space(limited, solver, key=0)
        assert found.feasible == bool(least <= limit)
        if found.feasible:
            check_fits(_layout(limited, found.choice), limited.devices)
            fitting = steps[np.sort(padded)[:200] <= limit].min()
            assert found.lower_bound <= fitting * (1 + 1e-9)
            if solver is None:
                assert found.cost <= fitting * (1 + 1e-9)
        elif solver is None:
            assert (found.excess, found.status) == (least - limit, "infeasible")


def test_more_memory_is_not_slower_and_bounds_hold_for_less():
    tables = _tables(5, 12)
    found = [solve_space(_space(tables, share * _needed(tables) / 4, 4), key=0) for share in (1.04, 1.2, 4.0)]
    assert all(solution.feasible for solution in found)
    assert found[0].cost >= found[1].cost * 0.99 >= found[2].cost * 0.98  # chains are random
    assert found[0].cost >= found[1].lower_bound >= found[2].lower_bound * (1 - 1e-6)


def test_other_solvers_get_limits_of_arrays_where_plain_limits_are_not_enough():
    """Each proposes a placement whose arrays fit, never slower than the default search's, with a bound that holds."""
    wide = [EmbeddingTable(f"wide{i}", 40, 128, 9.0) for i in range(3)]
    narrow = [EmbeddingTable(f"narrow{i}", 1500, 2, 1.0, "bfloat16") for i in range(3)]
    space = _space([*wide, *narrow], 36_000.0, 3)
    default = solve_space(space, key=0)
    assert default.feasible
    for solver in ("gradient", "greedy"):
        found = solve_space(space, solver, key=0, time_limit_s=2.0)
        assert found.feasible
        assert not space.arrays.excess(found.choice)
        assert found.lower_bound <= default.cost
        assert found.gap == pytest.approx(1 - found.lower_bound / found.cost)


def test_a_plan_that_fits_by_pieces_but_not_as_arrays_is_refused_with_the_missing_bytes():
    """Two dtypes on two devices: each alone would fill one device, and both are padded to that length on both."""
    tables = [EmbeddingTable("full", 1, 90), EmbeddingTable("half", 1, 90, dtype="bfloat16")]  # 364 and 184 bytes
    arguments = {"hardware": "a100", "batch_size": 2}
    plan = shard_tables(tables, AbstractMesh((2,), ("x",)), memory_limit_bytes=548, **arguments)
    assert plan.kept_bytes in (544, 548)  # 360 + 180 + 4 or 8
    with pytest.raises(InfeasibleError, match=r"No placement fits the memory: .* are 4 bytes longer"):
        shard_tables(tables, AbstractMesh((2,), ("x",)), memory_limit_bytes=540, **arguments)


def test_the_text_has_the_bytes_with_padding():
    tables = [EmbeddingTable("wide", 100, 128), EmbeddingTable("narrow", 2000, 2)]
    plan = shard_tables(tables, AbstractMesh((4,), ("x",)), hardware="a100", memory_limit_bytes=1e6)
    kept = dataclasses.replace(plan).layout.array_bytes()
    assert f"{kept / 1024:.1f} KiB kept on each device" in str(plan)
