"""Advice of a plan holds: who does what it says gets a plan that gains about what it says."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import diffshard
from diffshard.plans.page import format_page
from diffshard.plans.printing import format_bytes, format_s
from diffshard.plans.sections import LEAST_SHARE, MOST_LINES, Advice
from diffshard.sharding_search.number_formats import product_groups
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from search_spaces.sharding.one_device import on_one_device
from tests.diffshard.plans.small_plan import small_plan
from tests.diffshard.sharding_search.test_remat import arguments as layers
from tests.diffshard.sharding_search.test_remat import scanned_step
from tests.diffshard.sharding_search.test_whole_work import MESH, train_step


def arguments(rows, width, dtype="float32"):
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return params, (jax.ShapeDtypeStruct((rows, width), dtype),) * 2


def plan_of(rows, width, dtype="float32", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", diffshard.plans.WholeWorkWarning)
        return diffshard.search(train_step, MESH, hardware="h100", **options).plan(*arguments(rows, width, dtype))


def only(plan, word):
    """The only advice that has a word."""
    (found,) = [advice for advice in plan.advice if word in advice.words]
    return found


@pytest.fixture(scope="module")
def even():
    return plan_of(8192, 512)


def test_a_plan_that_nothing_improves_has_no_advice(even):
    assert even.advice == ()
    assert str(even).splitlines()[2].startswith("  step ")
    assert "What to change" not in format_page(even)


def test_donating_what_results_replace_saves_the_bytes_that_it_says():
    plan = plan_of(64, 8192)
    advice = only(plan, "donate `params` (`donate_argnums=(0,)`)")
    donated = plan_of(64, 8192, donate_argnums=0)
    assert plan.peak_bytes - donated.peak_bytes == pytest.approx(advice.num_bytes)
    assert advice.num_bytes > LEAST_SHARE * plan.peak_bytes
    assert donated.advice == ()


def test_what_donating_costs_at_most_is_said_with_it():
    fixed = {"up": PartitionSpec(), "down": None}, None
    plan, donated = (plan_of(64, 2048, in_shardings=fixed, donate_argnums=numbers) for numbers in ((), 0))
    more = float(only(plan, "donate").words.split("though a step takes up to ")[1].split(" µs more")[0])
    assert 0 < donated.step_s - plan.step_s <= 1e-6 * more * (1 + 1e-2)


def test_an_argument_that_only_comes_back_in_parts_is_not_to_be_donated():
    def step(params, x):
        return {"w": params["w"] + x.sum(), "copy": params["w"]}, params["w"] @ x

    shapes = {"w": jax.ShapeDtypeStruct((2048, 2048), "float32")}, jax.ShapeDtypeStruct((2048, 8), "float32")
    assert not any("donate" in a.words for a in diffshard.search(step, MESH, hardware="h100").plan(*shapes).advice)


def test_an_argument_that_is_taken_by_keyword_is_donated_by_name():
    def decode(x, *, cache):
        return jnp.einsum("btd,bd->bt", cache, x), cache * 0.5

    x, cache = jax.ShapeDtypeStruct((64, 128), "float32"), jax.ShapeDtypeStruct((64, 512, 128), "float32")
    plan = diffshard.search(decode, MESH, hardware="h100").plan(x, cache=cache)
    assert "(`donate_argnames=['cache']`)" in only(plan, "donate `cache`").words
    donated = diffshard.search(decode, MESH, hardware="h100", donate_argnames=["cache"]).plan(x, cache=cache)
    assert plan.peak_bytes - donated.peak_bytes == pytest.approx(only(plan, "donate").num_bytes)


def test_padding_saves_about_what_it_says():
    plan, even = plan_of(8191, 448), plan_of(8192, 448)
    advice = only(plan, "pad dimension 0 of batch[0] and of 1 more argument from 8,191 to 8,192")
    assert plan.compute_s - even.compute_s == pytest.approx(advice.seconds, rel=0.02)
    assert plan.step_s - even.step_s == pytest.approx(advice.seconds, rel=0.2)  # of the step it is less: more is sent
    assert advice.words.startswith(
        f"about {format_s(advice.seconds)} ({advice.seconds / plan.step_s:.0%}) less computing: "
    )


def test_an_operation_without_a_split_is_named_with_its_line():
    def step(weights, x):
        return weights - jnp.linalg.svd(weights @ x, full_matrices=False)[0]

    shapes = (jax.ShapeDtypeStruct((1024, 1024), "float32"),) * 2
    with pytest.warns(diffshard.plans.WholeWorkWarning):
        plan = diffshard.search(step, MESH, hardware="h100").plan(*shapes)
    advice = only(plan, "compute svd (1x, ")
    assert "test_advice.py" in advice.words
    assert advice.seconds == sum(work.seconds for work in plan.whole_work)


def test_a_given_sharding_costs_at_least_what_it_says():
    plan, free = (plan_of(8192, 1024, in_shardings=(None, spec)) for spec in (PartitionSpec("model"), None))
    advice = only(plan, "leave the sharding of `batch` (given) to the search")
    possible = plan.step_s - free.step_s
    assert possible - LEAST_SHARE * plan.step_s <= advice.seconds <= possible * (1 + 1e-3)


def test_a_given_sharding_that_costs_nothing_is_not_named(even):
    specs = even.arguments[-1].partition_spec
    assert plan_of(8192, 512, in_shardings=(None, specs)).advice == ()


def test_a_limit_of_the_memory_costs_at_least_what_it_says(even):
    plan = plan_of(8192, 512, memory_limit_bytes=34 * 2**20)
    advice = only(plan, "give each device")
    possible = plan.step_s - even.step_s
    assert possible - LEAST_SHARE * plan.step_s <= advice.seconds <= possible * (1 + 1e-3)
    mebibytes = float(advice.words.split("give each device ")[1].split(" MiB")[0])
    wider = plan_of(8192, 512, memory_limit_bytes=(mebibytes + 0.1) * 2**20)
    assert wider.step_s <= plan.step_s - advice.seconds + LEAST_SHARE * plan.step_s


def test_float8_saves_at_most_what_it_says():
    plan, args = plan_of(65536, 4096, "bfloat16"), arguments(65536, 4096, "bfloat16")
    advice = only(plan, "round products to float8")
    options = Options(fn=train_step, mesh=MESH, hardware=plan.hardware, memory_limit_bytes=1e15)
    groups = product_groups(space_of(options, trace_function(options, args)))
    formats = diffshard.formats.Formats(1.0, increases={group.name: 0.0 for group in groups})
    rounded = plan_of(65536, 4096, "bfloat16", formats=formats)
    assert plan.step_s - rounded.step_s == pytest.approx(advice.seconds, rel=0.05)
    assert plan.computing is not None
    assert advice.seconds <= plan.computing.products_s / 2  # the ratio of the rates
    assert not any("float8" in other.words for other in rounded.advice)


def test_hardware_without_float8_is_not_told_of_it():
    plan = diffshard.search(train_step, MESH, hardware="a100").plan(*arguments(65536, 4096, "bfloat16"))
    assert plan.advice == ()


def test_what_gains_most_comes_first_in_text_and_page_and_is_kept_in_the_file(tmp_path):
    plan = plan_of(64, 8192, in_shardings=({"up": PartitionSpec(), "down": None}, None))
    assert 2 <= len(plan.advice) <= MOST_LINES
    shares = [max(a.seconds / plan.step_s, a.num_bytes / plan.peak_bytes) for a in plan.advice]
    assert shares == sorted(shares, reverse=True)
    lines = str(plan).splitlines()
    assert lines[1] == ""
    assert lines[2].startswith(f"  advice   {plan.advice[0].words[:40]}")
    page = format_page(plan)
    assert page.index("What to change") < page.index("predicted step") < page.index("Time of a step")
    assert page.count("<li>at least") == sum(a.words.startswith("at least") for a in plan.advice) > 0
    plan.save(tmp_path / "plan.json")
    assert diffshard.Plan.load(tmp_path / "plan.json").advice == plan.advice


def test_products_and_traffic_are_all_of_computing(even):
    computing = even.computing
    assert computing.products_s + computing.traffic_s == pytest.approx(even.compute_s)
    products = [o for o in even.operations if o.signature.startswith("dot_general")]
    assert computing.products_s == pytest.approx(sum(o.compute_s for o in products))
    flops = 5 * 2 * 8192 * 512 * 2048 / 8  # two products forward, three backward: nobody needs the gradient of x
    hardware = even.hardware
    assert computing.products_share == pytest.approx(
        flops / hardware.peak_flops_per_s("float32") / computing.products_s
    )
    assert computing.products_share <= hardware.matrix_share
    assert 0 < computing.traffic_share <= hardware.memory_share


@pytest.mark.parametrize(
    ("advice", "message"),
    [
        (Advice("", 1e-3), r"`advice\[0\].words` must say what to change"),
        (Advice("faster", 11e-3), r"`advice\[0\]` saves 0.011 seconds and 0.0 bytes, more than the step"),
        (Advice("smaller", 0.0, 2048.0), "saves 0.0 seconds and 2048.0 bytes"),
    ],
)
def test_advice_that_cannot_be_is_refused(advice, message, tmp_path):
    path = tmp_path / "plan.json"
    small_plan(advice=(advice,)).save(path)
    with pytest.raises(diffshard.PlanError, match=message):
        diffshard.Plan.load(path)


def test_parts_that_are_not_all_of_computing_are_refused(even, tmp_path):
    path = tmp_path / "plan.json"
    dataclasses.replace(even, computing=dataclasses.replace(even.computing, traffic_s=0.0)).save(path)
    with pytest.raises(diffshard.PlanError, match=r"`computing` has .* seconds together, where `compute_s` is"):
        diffshard.Plan.load(path)


def test_more_memory_is_worth_what_is_computed_again():
    hardware = diffshard.Hardware("slow", 1e9, float("inf"), 1e12, {"data": diffshard.Link(1e-9, 1e-12)})
    mesh = AbstractMesh((2,), ("data",))
    free = diffshard.search(scanned_step, mesh, hardware=hardware).plan(*layers())
    limit = 0.45 * free.peak_bytes
    plan = diffshard.search(scanned_step, mesh, hardware=hardware, memory_limit_bytes=limit, remat="search").plan(
        *layers()
    )
    assert plan.recomputed
    (advice,) = plan.advice
    assert advice.words.endswith(f"give each device {format_bytes(free.peak_bytes)}, or more devices")
    assert advice.seconds == pytest.approx(plan.step_s - free.step_s, rel=0.1)


@pytest.mark.parametrize("shape", [(), (0, 4)])
def test_a_step_that_holds_nothing_has_a_plan_without_advice(shape):
    mesh = AbstractMesh((2,), ("d",))
    plan = diffshard.search(lambda s: s + 1, mesh, hardware="h100").plan(jax.ShapeDtypeStruct(shape, jnp.float32))
    assert plan.advice == ()


def test_a_step_that_one_device_computes_sooner_says_so():
    plan = plan_of(1024, 128)
    alone = diffshard.search(train_step, AbstractMesh((1,), ("data",)), hardware="h100").plan(*arguments(1024, 128))
    advice = only(plan, "one device alone")
    assert f"takes {format_s(alone.step_s)}" in advice.words
    assert plan.timeline is not None
    assert alone.step_s < plan.timeline.seconds


@pytest.mark.parametrize(("fn", "args"), [(train_step, arguments(1024, 128)), (scanned_step, layers())])
def test_what_one_device_takes_is_what_a_search_for_it_finds(fn, args):
    hardware = diffshard.preset("h100", dict(MESH.shape))
    options = Options(fn=fn, mesh=MESH, hardware=hardware, memory_limit_bytes=1e12)
    alone = on_one_device(space_of(options, trace_function(options, args)))
    plan = diffshard.search(fn, AbstractMesh((1,), ("data",)), hardware="h100").plan(*args)
    assert alone.step_s == pytest.approx(plan.step_s)
    assert alone.peak_bytes == pytest.approx(plan.peak_bytes)


def test_one_device_that_cannot_hold_the_step_is_not_advised():
    plan = plan_of(1024, 128)
    limit = (plan.peak_bytes + only(plan, "one device alone").num_bytes) * 1.01
    assert all("one device alone" not in advice.words for advice in plan_of(1024, 128, memory_limit_bytes=limit).advice)
