"""A plan of the bilevel search as one self-contained HTML page: what it saves, where, and what training said of it."""

import math
from collections.abc import Sequence

from diffshard.bilevel_search.plans.base import BilevelPlanData, Proof, TrainedCandidate
from diffshard.bilevel_search.plans.text import (
    baseline_name,
    bytes_line,
    chosen_and_exact_bytes,
    format_plan,
    has_traffic,
    is_shown_node,
    schedule_line,
    title,
    traffic_texts,
)
from diffshard.plans.drawings import Dot, scatter
from diffshard.plans.formats import format_bytes, format_s
from diffshard.plans.page_elements import COLOURS, cards, document, escape, plain_bar, table


def format_page(plan: BilevelPlanData) -> str:
    """Returns the page's text."""
    notes = [note for note in (schedule_line(plan), plan.message) if note]
    body = [
        f"<h1>{escape(title(plan))}</h1>",
        "".join(f"<div class=dim>{escape(note)}</div>" for note in notes),
        _cards(plan),
        _bars(plan),
        _nodes(plan),
        _candidates(plan.proof) if plan.proof else "",
        "".join(["<h2>Notes</h2><ul>", *(f"<li>{escape(n)}</li>" for n in plan.notes), "</ul>"]) if plan.notes else "",
        f"<details><summary>As text</summary><pre>{escape(format_plan(plan))}</pre></details>",
    ]
    return document(title(plan), body)


def _cards(plan: BilevelPlanData) -> str:
    pairs = [(format_s(plan.seconds), f"predicted step, {plan.cost_ratio:.1%} of {baseline_name(plan)}")]
    if not plan.all_exact:
        bound = "" if plan.max_loss_increase is None else f", {plan.max_loss_increase:.4g} allowed"
        how = "measured" if plan.proof else "predicted, not measured"
        pairs.append((f"{plan.loss_increase:+.4g}", f"loss over the exact choice's, {how}{bound}"))
        num_changed = sum(node.strategy != node.exact_strategy for node in plan.nodes)
        pairs.append((f"{num_changed} of {len(plan.nodes)}", "groups differ from the exact choice"))
    if has_traffic(plan):
        pairs.insert(2, (format_bytes(plan.sent_bytes), bytes_line(plan).split(" ", 2)[2]))
    return cards(*pairs)


def _bars(plan: BilevelPlanData) -> str:
    """Draws the seconds of each node, with the exact choice and as chosen, to one scale."""
    if not has_traffic(plan):
        return ""
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(plan.nodes))]
    rows = [
        ("the exact choice", [node.exact_seconds for node in plan.nodes]),
        (f"as chosen{', after the exact choice' if plan.exact_share else ''}", [node.seconds for node in plan.nodes]),
    ]
    whole = max(sum(seconds) for _, seconds in rows)
    bars = ""
    for name, seconds in rows:
        pieces = [(node.name, s, format_s(s), c) for node, s, c in zip(plan.nodes, seconds, colours, strict=True)]
        bars += f"<div style='margin:10px 0 3px'>{name} <span class=dim>{format_s(sum(seconds))}</span></div>"
        bars += plain_bar(pieces, whole)
    key = "".join(
        f'<span><i style="background:{colour}"></i>{escape(node.name)} '
        f"<span class=dim>{format_s(node.exact_seconds)} → {format_s(node.seconds)}</span></span>"
        for node, colour in zip(plan.nodes, colours, strict=True)
        if node.exact_seconds or node.seconds
    )
    return f"<h2>Communication of a step</h2>{bars}<div class=key>{key}</div>"


def _nodes(plan: BilevelPlanData) -> str:
    if not has_traffic(plan):
        rows = [(node.name, node.strategy, format_s(node.seconds)) for node in plan.nodes]
        return f"<h2>Choices</h2>{table(('name', 'chosen', 'takes'), rows, right=(2,))}"
    rows = []
    for node in plan.nodes:
        num_bytes = chosen_and_exact_bytes(node)
        if not is_shown_node(node):
            continue
        seconds = (node.seconds, node.exact_seconds)
        rows.append(
            (node.name, *traffic_texts(node), node.strategy, *map(format_bytes, num_bytes), *map(format_s, seconds))
        )
    head = ("group", "direction", "collective", "", "chosen", "sends", "exact", "takes", "exact")
    return f"<h2>Groups of sites</h2>{table(head, rows, right=(3, 5, 6, 7, 8))}"


def _candidates(proof: Proof) -> str:
    """Draws loss against seconds of those that were trained to the end, numbered as in the table of all."""
    rows = []
    for number, candidate in enumerate(proof.table, start=1):
        loss = (f"{candidate.loss:.4f}", f"{candidate.loss_increase:+.4f}", f"{candidate.record.steps:,}")
        shown_number = str(number) if number <= len(proof.finalists) else ""
        rows.append((shown_number, candidate.name, format_s(candidate.seconds), *loss))
    head = ("", "candidate", "step", "loss", "increase", "steps")
    summary = (
        f"{len(proof.table)} trained from the start, {proof.steps:,} steps in all; those without a number were dropped"
    )
    return (
        f"<h2>Candidates</h2><div class=dim>{summary} on the way, with fewer steps</div>"
        f"{_picture(proof.finalists)}{table(head, rows, right=(0, 2, 3, 4, 5))}"
    )


def _picture(finalists: Sequence[TrainedCandidate]) -> str:
    """Draws loss against seconds, the finalists by their numbers; those whose loss is not finite are left out."""
    dots = []
    for i, t in enumerate(finalists, start=1):
        if not math.isfinite(t.loss):
            continue
        name = " chosen" if i == 1 else " exact" if t.name == "exact" else ""
        colour = "second" if i == 1 else "first" if t.name == "exact" else "other"
        dots.append(Dot(t.seconds, t.loss, f"{i}{name}", f"{t.name}: {format_s(t.seconds)}, {t.loss:.4f}", colour))
    if not dots:
        return ""
    seconds, losses = [dot.x for dot in dots], [dot.y for dot in dots]
    return scatter(
        "Loss against predicted step",
        dots,
        across=(format_s(min(seconds)), "predicted step", format_s(max(seconds))),
        up=(f"loss {min(losses):.4f}", f"loss {max(losses):.4f}"),
    )
