"""Budgets: the joint problem adds up, the choice is the best of all, never worse than alone, and runs."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import diffshard
from cost.evaluation import evaluate
from diffshard.budgets import budget as budget_module
from diffshard.budgets.job import job_of, requests_of
from diffshard.budgets.joint import choices_of, joint_problem
from diffshard.elastic import Phase
from diffshard.sharding_search.options import Options
from diffshard.solving.objectives.objective import PricedObjective
from search_spaces.partition_specs import named_spec, partition_spec
from tests.diffshard.sharding_search import test_remat
from tests.diffshard.sharding_search.small_searches import assert_equal, train_arguments, train_step

LARGE, SMALL = (AbstractMesh(sizes, ("x", "y")) for sizes in ((2, 2), (1, 2)))


def hardware(s_per_byte, name="even"):
    """Returns hardware on which splitting pays, with links of some speed."""
    links = {a: diffshard.Link(1e-9, s_per_byte) for a in ("x", "y")}
    return diffshard.Hardware(name, 1e7, float("inf"), float("inf"), links)


FAST, SLOW = hardware(1e-9, "fast"), hardware(1e-5, "slow")


def descend(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


ARGUMENTS = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((32, 8), "float32")


def phases(*num_steps, meshes=(LARGE, SMALL, LARGE), hardware=FAST):
    return [Phase(mesh=m, num_steps=n, hardware=hardware) for m, n in zip(meshes, num_steps, strict=False)]


def made_job(phases, args=ARGUMENTS, fn=descend, limit=float("inf")):
    options = [Options(fn=fn, mesh=p.mesh, hardware=p.hardware, memory_limit_bytes=limit) for p in phases]
    return job_of(phases, requests_of(options, args), None)


def test_the_joint_objective_is_that_of_all_steps_and_moves():
    job = made_job(phases(3, 5, 7))
    problem, objective = joint_problem(job.phases, job.spaces, job.moves_s, job.is_state)
    priced = PricedObjective(objective, problem)
    generator = np.random.default_rng(0)
    for _ in range(20):
        choice = np.array([int(generator.integers(len(cost))) for cost in problem.node_cost])
        outcome = job.outcome([job.candidate(i, own) for i, own in enumerate(choices_of(job.spaces, choice.tolist()))])
        assert priced.price(priced.amounts(choice)) == pytest.approx(job.total(outcome))


@pytest.mark.parametrize("link", [FAST, SLOW], ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("num_steps", [(1, 1), (50, 1), (1, 50)])
def test_the_choice_is_the_best_of_all_pairs_of_shardings(link, num_steps):
    pair = phases(*num_steps, hardware=link)
    job = made_job(pair)
    seconds = []
    for phase, space in zip(pair, job.spaces, strict=True):
        specs = dict.fromkeys(s.unreduced[0] for s in space.nodes[0].strategies)
        given = {s: partition_spec(named_spec(s, ("x", "y"))) for s in specs}
        search = {
            s: diffshard.search(descend, phase.mesh, hardware=link, in_shardings=(spec, None)).plan(*ARGUMENTS).step_s
            for s, spec in given.items()
        }
        seconds.append(search)
    array = job.spaces[1].graph.inputs[0].results[0]
    best_s = min(
        num_steps[0] * seconds[0][one] + num_steps[1] * seconds[1][two] + job.moves_s[0](array, one, two)
        for one, two in itertools.product(*seconds)
    )
    found = diffshard.elastic.budget(descend, pair, *ARGUMENTS)
    assert found.chosen.total_s == pytest.approx(best_s, rel=1e-3)
    assert found.bound <= best_s * (1 + 1e-9)


def test_budgets_are_never_worse_than_plans_alone_and_better_where_phases_are_short():
    budgets = {n: diffshard.elastic.budget(descend, phases(n, n, n, hardware=SLOW), *ARGUMENTS) for n in (1, 10_000)}
    for found in budgets.values():
        assert found.bound <= found.chosen.total_s <= found.alone.total_s
        assert 0 <= found.gap < 1
    assert budgets[1].chosen.total_s < 0.99 * budgets[1].alone.total_s
    steps = [(a.step_s, b.step_s) for a, b in zip(budgets[10_000].plans, budgets[10_000].alone.plans, strict=True)]
    assert all(one == pytest.approx(other, rel=1e-3) for one, other in steps)


def test_a_solver_that_finds_nothing_good_leaves_the_plans_alone(monkeypatch):
    real = budget_module.solve

    def worst(problem, **options):
        solution = real(problem, **options)
        return solution._replace(choice=tuple(len(cost) - 1 for cost in problem.node_cost))

    monkeypatch.setattr(budget_module, "solve", worst)
    found = diffshard.elastic.budget(descend, phases(2, 2), *ARGUMENTS)
    layouts = [[[t.spec for t in plan.arguments] for plan in some.plans] for some in (found.chosen, found.alone)]
    assert layouts[0] == layouts[1]
    assert found.moves == found.alone.moves


def test_each_phase_keeps_its_own_memory_limit():
    small = Phase(mesh=SMALL, num_steps=1, hardware=SLOW, memory_limit_bytes=2400)
    free = Phase(mesh=SMALL, num_steps=1, hardware=SLOW)
    large = Phase(mesh=LARGE, num_steps=1, hardware=SLOW, memory_limit_bytes=50_000)
    assert diffshard.elastic.budget(descend, [large, free], *ARGUMENTS).plans[1].peak_bytes > 2400
    found = diffshard.elastic.budget(descend, [large, small, large], *ARGUMENTS)
    assert found.plans[1].peak_bytes <= 2400
    assert all(plan.peak_bytes <= 50_000 for plan in found.plans)
    too_small = Phase(mesh=SMALL, num_steps=1, hardware=SLOW, memory_limit_bytes=100)
    with pytest.raises(diffshard.InfeasibleError, match=r"^Phase 1: `memory_limit_bytes` is 100"):
        diffshard.elastic.budget(descend, [large, too_small], *ARGUMENTS)


def test_durations_are_filled_with_the_most_steps():
    def timed(*durations_s):
        pairs = zip((LARGE, SMALL, LARGE), durations_s, strict=False)
        return [Phase(mesh=mesh, duration_s=duration_s, hardware=SLOW) for mesh, duration_s in pairs]

    found = diffshard.elastic.budget(descend, timed(0.01, 0.01, 0.01), *ARGUMENTS)
    assert found.alone.total_steps <= found.chosen.total_steps <= found.bound
    moves_s = (0.0, *(move.seconds for move in found.moves))
    for plan, move_s, num_steps in zip(found.plans, moves_s, found.chosen.num_steps, strict=True):
        assert num_steps * plan.step_s + move_s == pytest.approx(0.01)
    short = diffshard.elastic.budget(descend, timed(1e-3, 0.01), *ARGUMENTS)  # the first phase is not worth a move
    assert short.chosen.total_steps > 1.001 * short.alone.total_steps
    assert short.chosen.total_steps <= short.bound
    assert "steps, " in str(short)


def test_durations_too_short_for_a_step_have_no_bound_and_those_of_steps_without_time_no_number(tmp_path):
    def timed(duration_s, flops_per_s):
        links = {axis: diffshard.Link(0.0, 0.0) for axis in ("x", "y")}
        hardware = diffshard.Hardware("test", flops_per_s, math.inf, math.inf, links)
        return [Phase(mesh=mesh, duration_s=duration_s, hardware=hardware) for mesh in (LARGE, SMALL)]

    found = diffshard.elastic.budget(descend, timed(math.ulp(0.0), 1e-3), *ARGUMENTS)
    assert (found.chosen.total_steps, found.step_s, found.lower_bound_s) == (0.0, math.inf, 0.0)
    found.save(tmp_path / "budget.json")
    assert str(diffshard.elastic.Budget.load(tmp_path / "budget.json")) == str(found)
    with pytest.raises(ValueError, match=r"`Phase.duration_s` 1.0 of phase 0 .* by the rates of the hardware 'test'"):
        diffshard.elastic.budget(descend, timed(1.0, math.inf), *ARGUMENTS)


def test_a_job_goes_on_through_all_phases_as_on_one_device():
    meshes = [
        jax.make_mesh(sizes, ("x", "y"), (AxisType.Auto,) * 2, devices=jax.devices()[:n])
        for sizes, n in (((2, 2), 4), ((1, 2), 2), ((4, 2), 8))
    ]
    state, batch = train_arguments()
    expected, _ = train_arguments()
    found = diffshard.elastic.budget(train_step, phases(2, 2, 2, meshes=meshes, hardware=SLOW), state, batch)
    for i, plan in enumerate(found.plans):
        state = found.move(i, state)
        assert jax.tree.leaves(state)[0].sharding.mesh.shape == meshes[i].shape
        step = found.step(i)
        for _ in range(2):
            state, loss = step(state, plan.shard(batch=batch))
            expected, expected_loss = train_step(expected, batch)
            assert_equal((state, loss), (expected, expected_loss))


def test_a_phase_with_little_memory_computes_again_and_trains_as_one_device(tmp_path):
    limit, args = 0.7 * test_remat.least_bytes_of_shardings(), test_remat.arguments()
    sizes, devices = (4, 2), jax.devices()
    meshes = [jax.make_mesh((n,), ("data",), (AxisType.Auto,), devices=devices[:n]) for n in sizes]
    limits = None, limit
    pair = [
        Phase(mesh=m, num_steps=2, hardware="h100", memory_limit_bytes=n) for m, n in zip(meshes, limits, strict=True)
    ]
    with pytest.raises(diffshard.InfeasibleError, match="Phase 1: `memory_limit_bytes` is 3"):
        diffshard.elastic.budget(test_remat.scanned_step, pair, *args)
    found = diffshard.elastic.budget(test_remat.scanned_step, pair, *args, remat="search")
    assert all(plan.remat is not None for plan in found.plans)
    assert found.plans[1].recomputed
    assert found.plans[1].peak_bytes <= limit
    assert all(0 < plan.lower_bound_s <= plan.step_s for plan in found.plans)
    assert found.step_s >= found.lower_bound_s > 0
    found.save(tmp_path / "budget.json")
    loaded = diffshard.elastic.Budget.load(tmp_path / "budget.json", test_remat.scanned_step, meshes)
    state, expected = args[0], args[0]
    for i, plan in enumerate(loaded.plans):
        state, step = loaded.move(i, state), loaded.step(i)
        state, loss = step(state, plan.shard(x=args[1]))
        expected, expected_loss = jax.jit(test_remat.scanned_step)(expected, args[1])
        assert_equal((state, loss), (expected, expected_loss))


def test_a_budget_from_a_file_runs_in_the_process_of_one_phase(tmp_path):
    meshes = [
        jax.make_mesh(sizes, ("x", "y"), (AxisType.Auto,) * 2, devices=jax.devices()[:n])
        for sizes, n in (((2, 2), 4), ((1, 2), 2))
    ]
    state, batch = train_arguments()
    made = diffshard.elastic.budget(train_step, phases(2, 2, meshes=meshes, hardware=SLOW), state, batch)
    made.save(tmp_path / "budget.json")
    shown = diffshard.elastic.Budget.load(tmp_path / "budget.json")
    assert (str(shown), shown.certificate) == (str(made), made.certificate)
    assert [phase.devices for phase in shown.phases] == [(0, 1, 2, 3), (0, 1)]
    with pytest.raises(diffshard.PlanError, match="was loaded without its function"):
        shown.step(1)
    loaded = diffshard.elastic.Budget.load(tmp_path / "budget.json", train_step, [None, meshes[1]])
    new_state, loss = loaded.step(1)(loaded.move(1, state), loaded.plans[1].shard(batch=batch))
    assert_equal((new_state, loss), train_step(train_arguments()[0], batch))
    with pytest.raises(diffshard.PlanError, match=r"`meshes\[0\]` has the axes {'x': 1, 'y': 2}; the plan"):
        diffshard.elastic.Budget.load(tmp_path / "budget.json", meshes=[meshes[1], None])
    with pytest.raises(diffshard.PlanError, match="`meshes` must be 2, one for each phase, not 1"):
        diffshard.elastic.Budget.load(tmp_path / "budget.json", meshes=[meshes[1]])


def test_the_table_has_a_line_for_each_phase():
    text = str(diffshard.elastic.budget(descend, phases(3, 5, 7), *ARGUMENTS))
    assert text.startswith("Budget of descend over 3 phases: ")
    for words in ("4 devices (x 2 x y 2)", "2 devices (x 1 x y 2)", "  alone    ", "gap "):
        assert words in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_devices_of_a_phase_are_those_of_the_mesh_or_the_first():
    assert Phase(mesh=SMALL, num_steps=1).devices == (0, 1)
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[6:])
    assert Phase(mesh=mesh, num_steps=1).devices == (6, 7)
    kept = Phase(mesh=SMALL, num_steps=1, hardware=SLOW, device_ids=(2, 3))
    assert kept.devices == (2, 3)
    specs = PartitionSpec("x", "y"), None
    given = diffshard.elastic.budget(descend, [*phases(1, hardware=SLOW), kept], *ARGUMENTS, in_shardings=specs)
    assert given.moves[0].num_bytes == 2 * 4 * 4 * 8  # devices 2 and 3 held half of what each needs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`Phase` takes either `num_steps` or `duration_s`, got None and None"),
        ({"num_steps": 1, "duration_s": 1.0}, "`Phase` takes either `num_steps` or `duration_s`, got 1 and 1.0"),
        ({"num_steps": 0}, "`Phase.num_steps` must be a whole number, 1 or more, not 0"),
        ({"num_steps": 1.5}, "`Phase.num_steps` must be a whole number, 1 or more, not 1.5"),
        ({"duration_s": float("inf")}, "`Phase.duration_s` must be a positive finite number, not inf"),
        ({"num_steps": 1, "memory_limit_bytes": -1}, "`Phase.memory_limit_bytes` must be a positive number or None"),
        ({"num_steps": 1, "device_ids": (0, 0)}, "`Phase.device_ids` must be 2 different whole numbers"),
        ({"num_steps": 1, "device_ids": (0,)}, "`Phase.device_ids` must be 2 different whole numbers"),
        ({"num_steps": 1, "device_ids": (-1, 0)}, r"`Phase.device_ids` must be .*, 0 or more, .*, not \(-1, 0\)"),
        ({"num_steps": 1, "device_ids": 2}, "`Phase.device_ids` must be 2 different whole numbers, .*, not 2"),
    ],
)
def test_bad_phases_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        Phase(mesh=SMALL, **options)


def test_bad_arguments_are_told():
    one = phases(1)
    with pytest.raises(TypeError, match=r"`Phase.mesh` must be a jax.sharding.Mesh or an AbstractMesh, not "):
        Phase(mesh=8, num_steps=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="`phases` must be a list of Phase, not AbstractMesh"):
        diffshard.elastic.budget(lambda x: x, SMALL)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`phases` must be two or more"):
        diffshard.elastic.budget(descend, one, *ARGUMENTS)
    with pytest.raises(TypeError, match=r"`phases\[1\]` must be a Phase, not AbstractMesh"):
        diffshard.elastic.budget(descend, [*one, SMALL], *ARGUMENTS)  # pyright: ignore[reportArgumentType]
    timed = Phase(mesh=SMALL, duration_s=1.0, hardware=FAST)
    with pytest.raises(ValueError, match="all have `num_steps` or all `duration_s`; phases 0 and 1 differ"):
        diffshard.elastic.budget(descend, [*one, timed], *ARGUMENTS)
    with pytest.raises(TypeError, match="`move_link` must be a Link or None, not float"):
        diffshard.elastic.budget(descend, phases(1, 1), *ARGUMENTS, move_link=1.0)  # pyright: ignore[reportArgumentType]
    single = AbstractMesh((1,), ("x",))
    lonely = [Phase(mesh=single, num_steps=1, hardware=FAST, device_ids=(i,)) for i in (0, 1)]
    with pytest.raises(ValueError, match="`move_link` must be given: phases 0 and 1 have one device each"):
        diffshard.elastic.budget(descend, lonely, *ARGUMENTS)
    found = diffshard.elastic.budget(descend, lonely, *ARGUMENTS, move_link=diffshard.Link(0.0, 1.0))
    assert found.moves[0].seconds == 4 * 8 * 16
    with pytest.raises(ValueError, match="`phase` must be a whole number from 0 to 1, not 2"):
        found.step(2)


def test_the_memory_of_a_joint_problem_is_that_of_each_phase_in_shares_of_its_own_limit():
    limits = 6000.0, math.inf, 2500.0
    pairs = zip(phases(1, 1, 1), limits, strict=True)
    options = [Options(fn=descend, mesh=p.mesh, hardware=FAST, memory_limit_bytes=m) for p, m in pairs]
    job = job_of(phases(1, 1, 1), requests_of(options, ARGUMENTS), None)
    problem, _ = joint_problem(job.phases, job.spaces, job.moves_s, job.is_state)
    generator = np.random.default_rng(0)
    fits = []
    for _ in range(200):
        choice = [int(generator.integers(len(cost))) for cost in problem.node_cost]
        choices = choices_of(job.spaces, choice)
        excess = [evaluate(space.problem, own).excess for space, own in zip(job.spaces, choices, strict=True)]
        # What exceeds a limit of 2,500 bytes by a half exceeds the common one of 6,000 by a half.
        expected = max(excess[0], excess[2] * limits[0] / limits[2])
        assert evaluate(problem, choice).excess == pytest.approx(expected)
        fits.append(expected == 0)
    assert 0 < sum(fits) < len(fits)
