"""Reshards, played through on blocks of index arrays, and held against every other way to get there."""

import random
from functools import cache
from itertools import permutations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cost.base import Hardware, Link
from cost.collectives import collective_sent_bytes
from cost.lines import Line, least_s
from diffshard.checks.collectives import hlo_collectives
from search_spaces.sharding.reshard_costs import ReshardCosts
from search_spaces.sharding.resharding import REFERENCE_BYTES
from search_spaces.sharding.spec import axes_in, divides, parts_of, replicated_spec, specs_of_shape

KINDS = ("slice", "all_gather", "all_to_all", "collective_permute")
AXES = ("x", "y", "z", "w")


@cache
def paths(sizes, seed=0):
    """Links with bandwidths up to a thousand times apart; with odd seeds each kind has three lines of its own."""
    rng = random.Random(seed)

    def line():
        return Line(10 ** rng.uniform(-7, -5), 10 ** rng.uniform(-12, -9))

    links = {a: Link(*line(), {k: (line(), line(), line()) for k in KINDS[1:]} if seed % 2 else {}) for a in AXES}
    return ReshardCosts(AXES[: len(sizes)], sizes, Hardware("random", 1.0, 1.0, 1.0, links)).path


@cache
def ordered_specs(rank, sizes):
    """Every spec of so many dimensions, the axes of a dimension in every order."""
    found = {replicated_spec(rank)}
    for count in range(1, len(sizes) + 1):
        for axes in permutations(range(len(sizes)), count):
            for places in product(range(rank), repeat=count):
                found.add(tuple(tuple(a for a, p in zip(axes, places, strict=True) if p == d) for d in range(rank)))
    return sorted(found)


@cache
def block(spec, sizes, device):
    """The part of an array of flat indices that a device holds; every dimension is as long as there are devices."""
    n = int(np.prod(sizes))
    part = np.arange(n ** len(spec)).reshape((n,) * len(spec))
    for d, axes in enumerate(spec):
        index = 0
        for a in axes:
            index = index * sizes[a] + device[a]
        length = n // int(np.prod([sizes[a] for a in axes]))
        part = part.take(range(index * length, (index + 1) * length), axis=d)
    return part


def devices(sizes):
    return list(product(*map(range, sizes)))


def group(device, axis, sizes):
    return [(*device[:axis], i, *device[axis + 1 :]) for i in range(sizes[axis])]


@cache
def does(kind, axis, before, after, sizes):
    """Whether a collective along an axis turns one layout into the other, by what each device ends up with."""
    old = {device: block(before, sizes, device) for device in devices(sizes)}
    new = {device: block(after, sizes, device) for device in devices(sizes)}
    dims, n = range(len(before)), sizes[axis]

    def everywhere(result):
        return all(np.array_equal(result(device), new[device]) for device in devices(sizes))

    def piece(array, index, d):
        return np.split(array, n, axis=d)[index] if array.shape[d] % n == 0 else np.zeros(0)

    if kind == "slice":
        return any(everywhere(lambda dev, d=d: piece(old[dev], dev[axis], d)) for d in dims)
    if kind == "all_gather":
        return any(
            everywhere(lambda dev, d=d: np.concatenate([old[g] for g in group(dev, axis, sizes)], d)) for d in dims
        )
    if kind == "all_to_all":
        return any(
            i != j
            and all(old[dev].shape[j] % n == 0 for dev in devices(sizes))
            and everywhere(
                lambda dev, i=i, j=j: np.concatenate([piece(old[g], dev[axis], j) for g in group(dev, axis, sizes)], i)
            )
            for i in dims
            for j in dims
        )
    held, wanted = (sorted(b.tobytes() for b in blocks.values()) for blocks in (old, new))
    return before != after and held == wanted and old[devices(sizes)[0]].shape == new[devices(sizes)[0]].shape


def size_along_axis(kind, axis, before, after, sizes):
    """As in `cost.collectives`: the gathered result, the operand of a permute, n operands of an exchange."""
    whole = int(np.prod(sizes)) ** len(before)
    operand, result = (block(spec, sizes, devices(sizes)[0]).size / whole for spec in (before, after))
    return {"slice": 0, "all_gather": result, "all_to_all": operand * sizes[axis], "collective_permute": operand}[kind]


@pytest.mark.parametrize(
    ("rank", "sizes"), [(1, (2, 3, 2)), (2, (2, 2)), (3, (2, 2)), (2, (2, 3, 2)), (2, (2, 2, 2)), (3, (2, 2, 2))]
)
def test_every_step_is_the_collective_that_it_says(rank, sizes):
    specs = ordered_specs(rank, sizes) if rank < 3 or len(sizes) < 3 else specs_of_shape((8,) * rank, sizes)
    steps = set()
    for source, target in product(specs, specs):
        spec = source
        for move in paths(sizes)(source, target):
            steps.add((spec, move))
            spec = move.spec
        assert spec == target
    assert {move.kind for _, move in steps} == set(KINDS) - ({"all_to_all"} if rank == 1 else set())
    for spec, move in steps:
        assert does(move.kind, move.axis, spec, move.spec, sizes), (spec, move)
        assert move.fraction == pytest.approx(size_along_axis(move.kind, move.axis, spec, move.spec, sizes)), (
            spec,
            move,
        )


def test_a_permute_belongs_to_the_slowest_axis_that_changes_place():
    for seed in range(0, 10, 2):
        path = paths((2, 2, 2), seed)
        slowness = [rates.s_per_byte("collective_permute") for rates in path.rates]
        (move,) = path(((0,), (1,), (2,)), ((1,), (0,), (2,)))
        assert (move.kind, move.fraction) == ("collective_permute", 1 / 8)
        assert move.axis == max((0, 1), key=slowness.__getitem__)


def test_nothing_to_do_is_no_step():
    assert paths((2, 2))(((0,), (1,)), ((0,), (1,))) == ()


@pytest.mark.parametrize(("shape", "sizes"), [((2, 6), (2, 3, 2)), ((4, 2, 2), (2, 2)), ((6, 4, 3), (2, 3, 2))])
def test_what_divides_at_both_ends_divides_throughout(shape, sizes):
    for seed in range(3):
        for source, target in product(specs_of_shape(shape, sizes), repeat=2):
            for move in paths(sizes, seed)(source, target):
                assert divides(move.spec, shape, sizes), (source, target, move)


def single_steps(rank, sizes, path):
    """Seconds of the cheapest collective between any two specs, infinite where none does it; found by playing all."""
    specs = ordered_specs(rank, sizes)
    cost = np.full((len(specs), len(specs)), np.inf)
    np.fill_diagonal(cost, 0)
    for (i, before), (j, after) in product(enumerate(specs), enumerate(specs)):
        for kind, axis in product(KINDS, range(len(sizes))):
            if kind != "collective_permute" and does(kind, axis, before, after, sizes):
                size = size_along_axis(kind, axis, before, after, sizes) * REFERENCE_BYTES
                seconds = 0 if kind == "slice" else least_s(path.rates[axis].lines[kind], size)
                cost[i, j] = min(cost[i, j], seconds)
        if does("collective_permute", 0, before, after, sizes):
            axis = slowest_of_a_permute(before, after, sizes, path)
            size = size_along_axis("collective_permute", axis, before, after, sizes) * REFERENCE_BYTES
            cost[i, j] = min(cost[i, j], least_s(path.rates[axis].lines["collective_permute"], size))
    return specs, cost


def slowest_of_a_permute(before, after, sizes, path):
    """Of the axes along which some device's block depends on its coordinate in another way than before."""

    def dependence(spec, axis):
        first = devices(sizes)[0]
        starts = [block(spec, sizes, device) for device in group(first, axis, sizes)]
        return [start.flat[0] for start in starts]

    moved = [a for a in range(len(sizes)) if dependence(before, a) != dependence(after, a)]
    return max(moved, key=lambda a: path.rates[a].s_per_byte("collective_permute"))


@pytest.mark.parametrize(("rank", "sizes"), [(2, (2, 2)), (2, (2, 4)), (3, (2, 2)), (2, (2, 2, 2)), (1, (2,) * 4)])
def test_no_other_way_is_cheaper(rank, sizes):
    """Against all sequences of collectives that never split a dimension finer than its ends allow."""
    for seed in range(2 if len(sizes) < 3 else 1):
        path = paths(sizes, seed)
        specs, cost = single_steps(rank, sizes, path)
        parts = np.array([parts_of(spec, sizes) for spec in specs])
        for (i, source), (j, target) in product(enumerate(specs), enumerate(specs)):
            allowed = (np.lcm(parts[i], parts[j]) % parts == 0).all(axis=1)
            near = cost[np.ix_(allowed, allowed)]
            best = near[np.count_nonzero(allowed[:i])]
            for _ in range(len(best)):
                shorter = (best[:, None] + near).min(axis=0)
                if (shorter == best).all():
                    break
                best = shorter
            found = sum(path.step_s(move, REFERENCE_BYTES) for move in path(source, target))
            assert found == pytest.approx(best[np.count_nonzero(allowed[:j])], rel=1e-9, abs=1e-15), (source, target)


@pytest.mark.parametrize("links", [("fast", "slow", "fast", "slow"), ("fast", "fast", "fast", "slow")])
def test_a_path_is_the_same_whatever_was_asked_for_before(links):
    """Searches go no further than somebody has asked, and on where they stopped."""
    of_name = {"fast": Link(1e-6, 1e-11), "slow": Link(1e-5, 1e-10)}
    hardware = Hardware("two speeds", 1.0, 1.0, 1.0, {a: of_name[link] for a, link in zip(AXES, links, strict=True)})
    near_first, far_first, alone = (ReshardCosts(AXES, (2,) * 4, hardware).path for _ in range(3))
    pairs = list(product(specs_of_shape((16, 4), (2,) * 4), repeat=2))
    random.Random(0).shuffle(pairs)
    found = {pair: near_first(*pair) for pair in sorted(pairs, key=lambda pair: len(alone(*pair)))}
    assert found == {pair: far_first(*pair) for pair in pairs}
    assert max(map(len, found.values())) > 2


@pytest.mark.parametrize("seed", [0, 1])
def test_lines_of_a_path_are_the_sums_of_those_of_its_steps(seed):
    path = paths((2, 3, 2), seed)
    sizes = np.geomspace(1.0, 1e12, 40)
    for source, target in product(ordered_specs(2, (2, 3, 2)), repeat=2):
        seconds = sum(least_s(path.step_lines(move), sizes) for move in path(source, target))
        np.testing.assert_allclose(least_s(path.lines(source, target), sizes), seconds, rtol=1e-12)


def test_equal_axes_may_change_places():
    """The tree of a path is shared among axes of equal size and link; the path is still the asker's own."""
    link = Link(1e-6, 1e-10)
    hardware = Hardware("equal", 1.0, 1.0, 1.0, dict.fromkeys(AXES, link))
    path = ReshardCosts(AXES[:3], (2, 2, 2), hardware).path
    for source, target in product(specs_of_shape((8, 8), (2, 2, 2)), repeat=2):
        spec = source
        for move in path(source, target):
            assert does(move.kind, move.axis, spec, move.spec, (2, 2, 2)), (source, target, move)
            assert move.kind != "collective_permute" or move.axis in axes_in(spec) | axes_in(move.spec)
            spec = move.spec
        assert spec == target


def test_xla_compiles_each_step_to_one_collective():
    sizes, shape = (2, 2, 2), (16, 16)
    mesh = jax.make_mesh(sizes, AXES[:3], (jax.sharding.AxisType.Auto,) * 3)
    steps = set()
    for source, target in product(specs_of_shape(shape, sizes), repeat=2):
        spec = source
        for move in paths(sizes)(source, target):
            steps.add((spec, move))
            spec = move.spec
    for spec, move in random.Random(0).sample(sorted(steps), 24):
        before, after = (
            NamedSharding(mesh, PartitionSpec(*(tuple(AXES[a] for a in axes) for axes in s))) for s in (spec, move.spec)
        )
        lowered = jax.jit(lambda x: x, in_shardings=before, out_shardings=after).lower(
            jax.ShapeDtypeStruct(shape, jnp.float32)
        )
        found = hlo_collectives(lowered.compile().as_text() or "", dict(mesh.shape))
        assert [c.kind for c in found] == ([] if move.kind == "slice" else [move.kind]), (spec, move)
        for collective in found:
            assert AXES[move.axis] in collective.axes
            assert collective.num_bytes == move.fraction * 16 * 16 * 4
            if move.kind != "collective_permute":
                assert collective.axes == (AXES[move.axis],)


def test_a_gather_over_two_equal_links_sends_what_one_ring_does():
    links = dict.fromkeys("xy", Link(1e-6, 1e-10))
    moves = ReshardCosts("xy", (2, 4), Hardware("equal", 1.0, 1.0, 1.0, links)).path(((0, 1),), ((),))
    assert [(m.kind, m.axis) for m in moves] == [("all_gather", 1), ("all_gather", 0)]
    sent = sum(float(collective_sent_bytes("all_gather", m.fraction * 800, (2, 4)[m.axis])) for m in moves)
    assert sent == pytest.approx(800 * 7 / 8)
