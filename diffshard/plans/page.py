"""A plan as one self-contained HTML page: how time and memory are spent, and each layer coloured by its shardings."""

import math
from collections.abc import Sequence

from diffshard.plans.base import PlanData
from diffshard.plans.comparison import page_elements
from diffshard.plans.layers import (
    Layer,
    LayerPart,
    LayerTraffic,
    flow_elements,
    flows_below,
    inside_element,
    layer_traffic,
    layers,
)
from diffshard.plans.memory import memory_elements
from diffshard.plans.page_elements import (
    COLOURS,
    COMPUTE,
    TRAFFIC,
    Curve,
    Html,
    Mark,
    axis_fills,
    bar,
    breakable,
    cards,
    document,
    escape,
    plot,
    table,
    with_code,
)
from diffshard.plans.printing import (
    format_bytes,
    format_percent,
    format_s,
    format_spec,
    is_shown,
    short_name,
)
from diffshard.plans.sections import computing_parts, whole_lines
from diffshard.plans.summary import (
    argument_rows,
    collective_totals,
    dearest_operations,
    shape_table,
    verdict,
)
from diffshard.plans.text import format_plan, formats_rows, formats_words, noise_words, trials_rows
from diffshard.plans.timeline import timeline_elements
from search_spaces.partition_specs import NamedSpec

_MOST_OPERATIONS = 8
"""Rows of operations; the text below has more of them."""
_MOST_OF_LAST_COST = 3.0  # of a solver's first choices those that cost more end at the drawing's upper edge


def format_page(plan: PlanData) -> str:
    """Returns a plan as the text of an HTML page."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in plan.mesh_axes.items()) or "no axes"
    devices = math.prod(plan.mesh_axes.values())
    shown_layers = layers(plan)
    fills = _fills(plan, shown_layers)
    body = [
        f"<h1>{escape(short_name(plan.function))} on {devices} device{'s' if devices != 1 else ''}</h1>",
        f"<div class=dim>mesh {escape(mesh)} · {escape(plan.hardware.name)} · {escape(plan.solver)} solver, "
        f"{escape(format_s(plan.search_s))} · gap {format_percent(plan.gap)}: {escape(verdict(plan))}</div>",
        _advice(plan),
        _cards(plan),
        _time(plan),
        _operations(plan),
        memory_elements(plan),
        _comparison(plan),
        _formats(plan),
        shape_table(plan),
        _graph(plan, shown_layers, fills),
        _argument_table(plan, fills),
        _history(plan),
        "".join(["<h2>Notes</h2><ul>", *(f"<li>{escape(n)}</li>" for n in plan.notes), "</ul>"]) if plan.notes else "",
        f"<details><summary>As text</summary><pre>{escape(format_plan(plan))}</pre></details>",
    ]
    return document(f"Plan of {short_name(plan.function)}", body)


def _fills(plan: PlanData, shown_layers: Sequence[Layer]) -> dict[frozenset[str], str]:
    """Returns a colour for each set of mesh axes that splits an array; single axes first, in the mesh's order."""
    specs = [t.spec for t in plan.arguments]
    specs += [
        p.spec
        for layer in shown_layers
        for p in (*layer.arguments, *layer.forward, *layer.backward)
        if p.spec is not None
    ]
    return axis_fills(specs, list(plan.mesh_axes))


def _axes(spec: NamedSpec) -> frozenset[str]:
    return frozenset(axis for axes in spec for axis in axes)


def _advice(plan: PlanData) -> str:
    """Lists what would make the step faster or smaller; nothing without any."""
    lines = "".join(f"<li>{with_code(advice.words)}</li>" for advice in plan.advice)
    return f"<h2>What to change</h2><ol class=advice>{lines}</ol>" if lines else ""


def _operations(plan: PlanData) -> str:
    """Lists the most expensive operations, each with a bar as long as its seconds."""
    groups = dearest_operations(plan)[:_MOST_OPERATIONS]
    rows, longest_s = [], groups[0].compute_s + groups[0].collective_s if groups else 0.0
    for i, g in enumerate(groups):
        seconds = g.compute_s + g.collective_s
        width = f"width:{100 * seconds / longest_s:.2f}%"
        moves = ", ".join(dict.fromkeys(f"{kind} {axis}" for kind, axis in g.collectives))
        rows.append(
            (
                Html(f"<b>{breakable(g.name)}</b>") if i == 0 else breakable(g.name),
                f"{len(g.operations)}×" if len(g.operations) > 1 else "",
                g.result,
                format_spec(g.spec),
                Html(f"<div class=taken>{escape(format_s(seconds))}<i class=share style='{width}'></i></div>"),
                f"{seconds / plan.step_s:.0%}",
                f"{format_s(g.collective_s)} for {moves}" if g.collective_s else "",
            )
        )
    head = ("name", "how many", "result", "sharding", "takes", "of the step", "of it communicating")
    return f"<h3>The most expensive operations</h3>{table(head, rows, right=(1, 5), first='dearest')}" if rows else ""


def _cards(plan: PlanData) -> str:
    limit = plan.memory_limit_bytes
    share = "no limit" if math.isinf(limit) else f"{plan.peak_bytes / limit:.0%} of {format_bytes(limit)}"
    objective = plan.objective
    is_proven = math.isfinite(objective.gap) if objective else plan.certificate.has_bound
    bound = f"{objective.lower_bound:.6g} of {objective.name}" if objective else format_s(plan.lower_bound_s)
    searched = [(f"{objective.value:.6g}", f"{objective.name}, which was made small")] if objective else []
    played = [(format_s(t.seconds), "of the same step played as a program")] if (t := plan.timeline) else []
    return cards(
        *searched,
        (format_s(plan.step_s), "predicted step"),
        (f"{(plan.step_s - plan.compute_s) / max(plan.step_s, 1e-30):.0%}", "of it communicates"),
        *played,
        (format_bytes(plan.peak_bytes), f"peak memory of a device: {share}"),
        (
            format_percent(plan.gap) if is_proven else "none",
            f"gap to the lower bound {bound}" if is_proven else "proven as a lower bound",
        ),
    )


def _time(plan: PlanData) -> str:
    pieces = _computing(plan)
    for i, total in enumerate(collective_totals(plan)):
        amounts = f"{total.time}, {total.count:,.0f}×, {format_bytes(total.num_bytes)}"
        pieces.append((f"{total.kind} {total.axis}".strip(), total.seconds, amounts, COLOURS[i % len(COLOURS)]))
    total, *reasons = whole_lines(plan.whole_work, plan.compute_s) or [""]
    whole = f"<div class=dim>{escape(total)}</div>" if total else ""
    whole += f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in reasons)}</ul>" if reasons else ""
    timeline = timeline_elements(t, plan.step_s, plan.hardware.exposed_share) if (t := plan.timeline) else ""
    return f"<h2>Time of a step</h2>{bar(pieces, plan.step_s)}{whole}{timeline}"


def _computing(plan: PlanData) -> list[tuple[str, float, str, str]]:
    """Returns the pieces of the bar of time that are computing."""
    return [
        (part.name, part.seconds, part.amounts, colour)
        for part, colour in zip(computing_parts(plan.computing), (COMPUTE, TRAFFIC), strict=True)
    ]


def _comparison(plan: PlanData) -> str:
    if plan.comparison is None:
        return ""
    return f"<h2>Compiled for {escape(plan.comparison.target)}</h2>{''.join(page_elements(plan.comparison))}"


def _formats(plan: PlanData) -> str:
    if plan.formats is None:
        return ""
    head, *rows = formats_rows(plan.formats)
    words = f"<div class=dim>{escape(formats_words(plan.formats))}</div>"
    page = f"<h2>Number formats</h2>{words}{table(head, rows, right=(1, 3, 4))}"
    if plan.formats.trials:
        head, *rows = trials_rows(plan.formats)
        words = f"<div class=dim>measured together, by {escape(plan.formats.measured_by)}</div>"
        page += words + table(head, rows, right=(1, 2, 3, 4))
        page += f"<div class=dim>{escape(noise_words(plan.formats))}</div>"
    return page


def _graph(plan: PlanData, shown_layers: Sequence[Layer], fills: dict[frozenset[str], str]) -> str:
    key = "".join(
        f'<span><i style="background:{colour}"></i>{escape(" + ".join(sorted(axes)) or "replicated")}</span>'
        for axes, colour in fills.items()
    )
    head = "<div class='layer head'><div>layer</div><div>arguments</div><div>forward</div><div>backward</div></div>"
    traffic = layer_traffic(plan, shown_layers)
    most_bytes = max((flow.num_bytes for flow in traffic.between), default=0.0)
    below = flows_below(traffic, shown_layers)
    cards_and_flows = (
        f"{_layer(layer, traffic, fills)}{flow_elements(layer, flows, most_bytes)}"
        for layer, flows in zip(shown_layers, below, strict=True)
    )
    between, inside = (sum(flow.num_bytes for flow in flows) for flows in (traffic.between, traffic.inside))
    amounts = [format_bytes(num_bytes) if is_shown(num_bytes) else "nothing" for num_bytes in (between, inside)]
    sums = f"In one step, collectives move {amounts[0]} between layers and {amounts[1]} inside them."
    return (
        f"<h2>Layers</h2><div class=dim>{sums}</div><div class=key style='margin-bottom:14px'>split over:&nbsp;{key}"
        f"</div>{head}{''.join(cards_and_flows)}"
    )


def _layer(layer: Layer, traffic: LayerTraffic, fills: dict[frozenset[str], str]) -> str:
    times = f" <span class=dim>× {layer.times}</span>" if layer.times > 1 else ""
    seconds = f"{format_s(layer.compute_s)} computing"
    if layer.collective_s:
        seconds += f"<br>{format_s(layer.collective_s)} communicating"
    if not layer.compute_s and not layer.collective_s:
        seconds = ""
    columns = (layer.arguments, layer.forward, layer.backward)
    return (
        f"<div class=layer><div><div class=name>{escape(layer.name)}{times}</div><div class=dim>{seconds}</div>"
        f"{inside_element(layer, traffic)}</div>"
        + "".join(f"<div>{''.join(_part(p, fills) for p in parts)}</div>" for parts in columns)
        + "</div>"
    )


def _part(part: LayerPart, fills: dict[frozenset[str], str]) -> str:
    times = f" × {part.times}" if part.times > 1 else ""
    amount = format_bytes(part.num_bytes) if part.num_bytes else format_s(part.seconds) if part.seconds else ""
    if part.spec is None:
        noun = "small operation" if part.times == 1 else "small operations"
        return f"<div class='part small'>{part.times} {noun}, {escape(amount)}</div>"
    moves = f"<div class=moves>{escape(', '.join(part.collectives))}</div>" if part.collectives else ""
    where = escape(f"{part.array} {part.source}")
    return (
        f'<div class=part style="background:{fills[_axes(part.spec)]}" title="{where}">{escape(part.name)}{times}'
        f"<div class=how><span>{escape(format_spec(part.spec))}</span><span>{escape(amount)}</span></div>"
        f"{moves}</div>"
    )


def _argument_table(plan: PlanData, fills: dict[frozenset[str], str]) -> str:
    rows = []
    for first, (name, count, array, place, *others) in argument_rows(plan, "×"):
        swatch = f'<i class=swatch style="background:{fills[_axes(first.spec)]}"></i>'
        rows.append((name, count, array, Html(f"<span>{swatch}{escape(place)}</span>"), *others))
    head = ("name", "how many", "type", "sharding", "on a device", "next best, what it adds")
    return f"<h2>Arguments</h2>{table(head, rows, right=(1, 4))}"


def _history(plan: PlanData) -> str:
    """Draws cost and bound over the solver's time as steps."""
    points = [p for p in plan.history if math.isfinite(p[1])]
    if len(points) < 2:
        return ""
    end = points[-1][0] or 1.0
    top = min(max(p[1] for p in points), _MOST_OF_LAST_COST * points[-1][1])
    costs = Curve(tuple((t, cost) for t, cost, _ in points), "first")
    bounds = Curve(tuple((t, bound) for t, _, bound in points if math.isfinite(bound)), "second")
    key = (
        "<div class=key><span><i style='background:var(--first)'></i>cost of the best plan</span>"
        "<span><i style='background:var(--second)'></i>lower bound</span></div>"
    )
    drawing = plot(
        "Cost and bound over time",
        (costs, bounds),
        right=end,
        top=1.1 * top,
        ends=("0 s", format_s(end)),
        marks=(Mark(format_s(points[-1][1]), "first", y=points[-1][1]),),
    )
    return f"<h2>Search</h2>{drawing}{key}"
