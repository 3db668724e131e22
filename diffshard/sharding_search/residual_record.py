"""Writes down what a search has chosen for what goes from forward to backward."""

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from diffshard.plans.sections import How, Rematerialisation, Residual
from diffshard.plans.summary import modules_of
from search_spaces.rematerialisation.choices import Network, RematChoice
from search_spaces.rematerialisation.offloading import HostLink
from search_spaces.rematerialisation.passes import Passes
from search_spaces.sharding.graph import Vertex


def record_of(
    network: Network, passes: Sequence[Passes], candidate: RematChoice, link: HostLink | None
) -> Rematerialisation:
    """Returns what is kept, what is computed again and what is offloaded, all that the same code makes together.

    Args:
      network: what values take.
      passes: the function's forward and backward passes.
      candidate: the choice.
      link: to the host's memory; None if nothing can be offloaded.
    """
    graph = network.graph
    groups: dict[tuple[str, str, How], list[tuple[float, float, float]]] = defaultdict(list)
    length = {v.id: one.length for one in passes for step in one.forward for v in step.results}
    offloaded = {value for value, *_ in candidate.offloaded}
    counted: set[int] = set()
    for value in sorted(candidate.kept | offloaded | network.needed):
        key = network.maker.get(value)
        is_again = key in candidate.recomputed
        how: How = "offloaded" if value in offloaded else "recomputed" if is_again else "kept"
        if how == "kept" and (value not in candidate.kept or not network.bytes[value]):
            continue
        vertex = graph.vertices[graph.values[value].vertex]
        num_bytes = network.bytes[value] if np.isfinite(network.bytes[value]) else 0.0
        seconds = 0.0
        if how == "offloaded" and link is not None:
            seconds = link.wait_s(num_bytes)
        elif how == "recomputed" and key not in counted and key is not None:
            seconds = network.steps[key]
            counted.add(key)
        groups[_name(vertex), vertex.user_source, how].append((num_bytes, seconds, length.get(value, 1)))
    residuals = [
        Residual(name, source, how, int(sum(n for *_, n in rows)), sum(b for b, *_ in rows), sum(s for _, s, _ in rows))
        for (name, source, how), rows in groups.items()
    ]
    residuals.sort(key=lambda r: (-r.num_bytes, r.name, r.how))
    return Rematerialisation(
        tuple(sorted(candidate.recomputed)),
        tuple(residuals),
        candidate.seconds,
        candidate.kept_bytes,
        tuple((value, gone, back) for value, gone, back in candidate.offloaded),  # plain tuples, as JSON has them
        candidate.host_bytes,
    )


def _name(vertex: Vertex) -> str:
    """Returns the modules and the operation of a vertex, without the numbers of layers."""
    modules = "/".join(modules_of(vertex.scope))
    return re.sub(r"\d+", "*", f"{modules}/{vertex.primitive or vertex.kind}".lstrip("/"))
