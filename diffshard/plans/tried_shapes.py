"""What became of the shapes of the mesh that a search has tried, as text and as a table of a page."""

import math

from diffshard.plans.base import PlanData, TriedShape
from diffshard.plans.certificate import has_bound
from diffshard.plans.formats import format_axes, format_count, format_s, format_table
from diffshard.plans.page_elements import table

MAX_LINES = 5
"""Lines of the text for shapes that were not chosen; the page has all of them."""


def shape_lines(plan: PlanData) -> list[str]:
    """Returns the lines of a plan's text about shapes of the mesh that were not chosen; none where a mesh was given."""
    if not plan.shapes:
        return []
    others = [shape for shape in plan.shapes if dict(shape.mesh_axes) != dict(plan.mesh_axes)]
    rows = [("", format_axes(shape.mesh_axes), _outcome(shape)) for shape in others[:MAX_LINES]]
    more = f"; {len(others) - MAX_LINES} more are not shown" if len(others) > MAX_LINES else ""
    best = "best" if plan.objective else "fastest"
    title = f"  mesh     the {best} of {format_count(len(plan.shapes), 'shape')}{more}"
    return [title, *format_table(rows, " " * 9)]


def shape_table(plan: PlanData) -> str:
    """Returns a page's section about the shapes of the mesh; "" where a mesh was given."""
    if not plan.shapes:
        return ""
    rows = [
        (
            format_axes(shape.mesh_axes),
            _best(shape),
            "nothing fits" if shape.status == "infeasible" else _bound(shape),
            shape.status,
            format_s(shape.search_s),
        )
        for shape in plan.shapes
    ]
    head = ("shape", "best plan", "at least", "search", "took")
    return f"<h2>Shapes of the mesh</h2>{table(head, rows, right=(1, 2, 4))}"


def _best(shape: TriedShape) -> str:
    if shape.objective is not None:
        return f"{shape.objective.name} {shape.objective.value:.6g}"
    return "" if shape.step_s is None else format_s(shape.step_s)


def _bound(shape: TriedShape) -> str:
    if shape.objective is not None:
        return f"{shape.objective.lower_bound:.6g}" if math.isfinite(shape.objective.lower_bound) else ""
    return format_s(shape.lower_bound_s) if has_bound(shape.lower_bound_s, 1.0) else ""


def _outcome(shape: TriedShape) -> str:
    if shape.status == "infeasible":
        return "no plan fits the memory"
    bound = f"at least {_bound(shape)}" if _bound(shape) else "no bound"
    return f"{_best(shape)}, {bound}" if _best(shape) else f"{bound}, {shape.status}"
