"""Chooses what a function computes again; the choices are those of `minimum_cuts`, in a traced function."""

from collections.abc import Callable, Sequence

import numpy as np

from search_spaces.rematerialisation.minimum_cuts import Choices, RematChoice
from search_spaces.rematerialisation.passes import (
    Passes,
    Step,
    backward_reads,
    made_by,
    results_of,
    step_key,
    values_read,
    vertices_of,
)
from search_spaces.sharding.graph import Graph, Region, Value, Vertex

_MOST_WIDTHS = 64
"""Different widths of the narrowest places that are tried; each takes about a millisecond."""
_REGIONS = ("scan", "cond", "remat2", "checkpoint", "remat")


class Network(Choices):
    """The choices of a function, with what they cost.

    Args:
      graph: the traced function.
      passes: its forward and backward passes.
      step_s: returns the seconds that a vertex takes in one step, its collectives included.
      kept_bytes: returns the bytes of a value of one trip on one device.
      is_written: tells whether a value exists in memory in the function as it is; others are computed in their readers.

    Attributes:
      step_s: returns the seconds of a vertex in one step.
      freeable: ids of the values that some choice does not keep on the device.
    """

    def __init__(
        self,
        graph: Graph,
        passes: Sequence[Passes],
        step_s: Callable[[Vertex], float],
        kept_bytes: Callable[[Value], float],
        is_written: Callable[[Value], bool],
    ):
        super().__init__()
        self.graph, self.step_s, self._kept_bytes, self._is_written = graph, step_s, kept_bytes, is_written
        self.freeable: set[int] = set()
        pairs = [one.pair for one in passes if one.pair is not None]
        pieces = [piece for pair in pairs for piece in pair.forward.slices]
        self._stack = {p.results[0].id: o for p in pieces if isinstance(o := p.operands[0], Value)}
        self._made = {value for one in passes for value in made_by(one.forward)}
        self._made |= {carry.results[0].id for pair in pairs for carry in pair.forward.carries}
        paired = {step_key(pair.forward) for pair in pairs}
        linked = {
            o.id
            for pair in pairs
            for piece in pair.backward.slices
            if piece.results[0].id in pair.aliases and isinstance(o := piece.operands[0], Value)
        }
        for one in passes:
            self._add_steps(one, paired)
            reads = [self._stack.get(value.id, value).id for _, value in backward_reads(one)]
            self.needed |= {value for value in reads if value in self._made and value not in linked}
        # What is only computed inside of its readers runs again there anyway, unless it reads what runs again.
        written = {key for v, key in self.maker.items() if np.isfinite(self.bytes[v]) and graph.values[v].shape}
        self.inside_readers = set(self.steps) - written
        self.freeable |= set(self.maker)
        for value, num_bytes in self.bytes.items():
            if not graph.values[value].shape or (not np.isfinite(num_bytes) and value not in self.maker):
                self.bytes[value] = 0.0

    def _add_steps(self, passes: Passes, paired: set[int]) -> None:
        """Adds the steps of a forward pass, and what keeping their results takes."""
        for step in passes.forward:
            key = step_key(step)
            results = results_of(step)
            if can_run_again(step) and key not in paired and not {v.id for v in results} & passes.pinned:
                self.steps[key] = sum(self.step_s(v) for v in vertices_of(step))
                read = [self._stack.get(v.id, v).id for v in values_read(step)]
                self.operands[key] = [v for v in read if v in self._made]
                self.maker.update((v.id, key) for v in results)
            for value in results:
                is_inside = passes.pair is None and not self._is_written(value)
                num_bytes = np.inf if is_inside else passes.length * self._kept_bytes(value)
                self.bytes[value.id] = 0.0 if value.id in passes.pinned else num_bytes
        if passes.pair is not None:
            for carry in passes.pair.forward.carries:
                self.bytes[carry.results[0].id] = passes.length * self._kept_bytes(carry.results[0])

    def between(self, more: RematChoice, less: RematChoice) -> list[RematChoice]:
        """Returns choices between two neighbours, of which `more` keeps more.

        A price treats equal layers alike, so that all of them change from one neighbour to the other, and where the
        inputs of layers are no longer kept, all layers are computed again at once. In between, every second, third or
        fourth value that changes is kept, or those of a part of the layers only.
        """
        changed = sorted(v for v in more.kept - less.kept if self.maker.get(v) in less.recomputed)
        count = len(changed)
        kept = [changed[start::period] for period in (2, 3, 4) for start in (0, period - 1)]
        kept += [changed[count * part // 4 :] for part in (1, 2, 3)]
        found = {self.candidate(less.recomputed - {self.maker[v] for v in values}) for values in kept if values}
        return [c for c in found if c.recomputed not in (more.recomputed, less.recomputed)]

    def at_narrow_places(self, passes: Passes) -> list[RematChoice]:
        """Returns choices that keep what goes through the narrowest places of a forward pass, such as layers' inputs.

        Everything between two kept places runs again at once.
        """
        if passes.pair is not None or not passes.forward:
            return []
        made = {v.id: i for i, step in enumerate(passes.forward) for v in results_of(step) if v.id in self.maker}
        read = {v.id: i for i, step in enumerate(passes.forward) for v in values_read(step)}
        spans = [(v, made[v], read[v], self._kept_bytes(self.graph.values[v])) for v in made if v in read]
        change = np.zeros(len(passes.forward) + 1)
        for _, start, end, num_bytes in spans:
            change[start] += num_bytes
            change[end] -= num_bytes
        crossing = np.cumsum(change)[:-1]
        found = []
        for width in np.unique(crossing[crossing > 0])[:_MOST_WIDTHS]:
            is_narrow = np.concatenate([[False], crossing <= width, [False]])
            edges = np.flatnonzero(np.diff(is_narrow.astype(int)))
            places = [a + int(np.argmin(crossing[a:b])) for a, b in zip(edges[::2], edges[1::2], strict=True)]
            kept = {v for v, start, end, _ in spans if any(start <= place < end for place in places)}
            found.append(self.candidate(frozenset(self.steps) - {self.maker[v] for v in kept}))
        return list({c.recomputed: c for c in found}.values())


def can_run_again(step: Step) -> bool:
    """Tells whether a step of the forward pass may run a second time: it has no effects and a known length."""
    if isinstance(step, Region):
        return step.equation.primitive.name in _REGIONS and not step.equation.effects
    return step.kind == "operation" and step.equation is not None and not step.equation.effects
