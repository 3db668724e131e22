"""What a plan leaves whole because it cannot be split: written down with names, and told by a warning."""

import warnings
from dataclasses import replace

from diffshard.plans.base import PlanData
from diffshard.plans.printing import format_count, short_name
from diffshard.plans.sections import WholeWork, WholeWorkWarning, warning_of
from diffshard.sharding_search.request import PlanRequest
from search_spaces.sharding.base import Layout
from search_spaces.sharding.explaining import sources_of
from search_spaces.sharding.whole_work import UnevenDimension, whole_work


def whole_work_of(request: PlanRequest, layout: Layout) -> tuple[WholeWork, ...]:
    """Returns the arithmetic that a layout of a request's space leaves whole because it cannot be split."""
    space, found = request.space, []
    for work in whole_work(space.graph, space.rules, space.nodes, layout.strategies, space.node_costs, space.loaded):
        (name, where), *others = sources_of(space.graph.vertices[i] for i in work.vertices)
        record = WholeWork(
            operations=f"{name} ({where})" + (f" and {format_count(len(others), 'other kind')}" if others else ""),
            indices=work.vertices,
            seconds=work.seconds,
            has_rule=all(space.rules[i] is not None for i in work.vertices),
        )
        found.append(record if work.uneven is None else _with_dimension(record, work.uneven, request))
    return tuple(found)


def warn_of_whole_work(plan: PlanData) -> None:
    """Warns of a plan in which devices repeat more than a tenth of the arithmetic."""
    text = warning_of(short_name(plan.function), plan.whole_work, plan.compute_s)
    if text is not None:
        warnings.warn(text, WholeWorkWarning, stacklevel=2)


def _with_dimension(record: WholeWork, uneven: UnevenDimension, request: PlanRequest) -> WholeWork:
    return replace(
        record,
        size=uneven.size,
        padded_size=-(-uneven.size // uneven.parts) * uneven.parts,
        axes=tuple(request.options.axis_names[a] for a in uneven.axes),
        arguments=tuple(request.traced_function.call.paths[i] for i, _ in uneven.inputs),
        dimension=uneven.inputs[0][1] if uneven.inputs else None,
    )
