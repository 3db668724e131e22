"""What notebooks show: the page of a plan in a frame, and what a planned function is for."""

import html

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.plans.comparison import ComparedPlan, Comparison
from diffshard.plans.page import format_page
from tests.diffshard.bilevel_search.plans.test_plan import validated_plan
from tests.diffshard.plans.page_checker import checked_page
from tests.diffshard.plans.small_plan import small_plan

MESH = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))


def pages(element):
    """The pages in the frames of an element, as a browser reads them."""
    return [attributes["srcdoc"] for tag, attributes in checked_page(element).elements if tag == "iframe"]


def test_everything_with_a_page_shows_it_in_a_frame():
    row = ComparedPlan("found", "program", 1e-3, 2e-3, 1e-3, 8.0, 8.0, 64.0, 64.0)
    for shown in (small_plan(), validated_plan(), Comparison("step", {"data": 2}, "H100", (row,))):
        page = shown.html()
        assert page.startswith("<!doctype html>")
        assert pages(shown._repr_html_()) == [page]
    assert small_plan().html() == format_page(small_plan())


def test_a_planned_function_says_what_it_is_for_and_then_shows_its_plans():
    def step(w, x):
        return w - x.sum()

    planned = diffshard.search(step, MESH, hardware="h100", solver="exact")
    text = html.unescape("".join(checked_page(planned._repr_html_()).texts))
    assert "step on 2 devices (data 2), H100-80GB" in text
    assert "Not planned yet" in text
    assert repr(planned) == "<PlannedFunction step on 2 devices (data 2), H100-80GB, 0 plans>"
    plans = [planned.plan(jax.ShapeDtypeStruct((n,), jnp.float32), jnp.ones(2)) for n in (4, 8)]
    assert pages(planned._repr_html_()) == [plan.html() for plan in plans]
    assert "24 B in 2 arrays" in planned._repr_html_()
    assert repr(planned).endswith(", 2 plans>")
