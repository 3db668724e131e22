"""Finds the forward and the backward pass of a differentiated training step.

JAX writes into the name stack of each equation which transformations made it: the equations of a backward pass stand in
`transpose(...)`. So a finished training step can be divided without its author's help: what is in `transpose(...)` is
backward, what depends on none of it is forward, and the rest, such as an optimiser's update, comes after both. The two
passes of a scan over layers are two scans; the second one reads the first one's stacked results.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from search_spaces.replay import REMAT
from search_spaces.sharding.graph import Block, Graph, Operand, Region, Value, Vertex, is_contraction

Step = Vertex | Region
_BACKWARD = "transpose("


@dataclass(frozen=True)
class ScanPair:
    """A scan of the forward pass, and the scan of the backward pass that reads what its trips leave.

    Attributes:
      forward, backward: the scans.
      aliases: what the body of `backward` reads of stacked results of `forward` that nothing else reads: by the id of
        the body's slice the value in the body of `forward`.
    """

    forward: Region
    backward: Region
    aliases: dict[int, Value]


@dataclass(frozen=True)
class Passes:
    """The steps of a forward and a backward pass.

    Attributes:
      forward: steps that depend on no step of the backward pass, in order.
      backward: steps of the backward pass, in order.
      pinned: ids of values that others read as well once the backward pass has begun.
      pair: the two scans whose bodies the steps are; None for steps of one block.
      length: trips of these scans; 1 for one block.
      around: the loop in whose body the forward pass is; None for the function's own steps.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    pinned: frozenset[int]
    pair: ScanPair | None = None
    length: int = 1
    around: Region | None = None


def step_key(step: Step) -> int:
    """Returns a number for a step that no other step has: a vertex's index, or a negative one for a region."""
    if isinstance(step, Vertex):
        return step.index
    if step.carries:
        return -1 - step.carries[0].index
    if step.equation.primitive.name in REMAT or not step.results:
        return -1 - min(v.index for v in vertices_of(step))
    return -1 - step.results[0].vertex


def vertices_of(step: Step) -> Iterator[Vertex]:
    """Yields the vertices of a step: itself, or those inside of a region and on its border."""
    if isinstance(step, Vertex):
        yield step
        return
    yield from (*step.carries, *step.slices)
    for block in step.blocks:
        for inner in block.steps:
            yield from vertices_of(inner)


def values_read(step: Step) -> list[Value]:
    """Returns the arrays that a step reads."""
    return [o for o in step.operands if isinstance(o, Value)]


def results_of(step: Step) -> list[Value]:
    """Returns the arrays that a step makes."""
    return list(step.results)


def is_backward(graph: Graph, step: Step) -> bool:
    """Returns whether a step belongs to a backward pass."""
    if isinstance(step, Vertex):
        return _BACKWARD in step.scope
    if step.equation.primitive.name in REMAT or not step.results:
        return any(_BACKWARD in v.scope for v in vertices_of(step))
    return _BACKWARD in graph.vertices[step.results[0].vertex].scope


def passes_of(graph: Graph) -> list[Passes]:
    """Returns the forward and backward passes of a function: of its own steps, of loops, and of pairs of scans."""
    return list(_passes_of_block(graph, graph.block, _ids(graph.outputs), None))


def _passes_of_block(graph: Graph, block: Block, ends: set[int], around: Region | None) -> Iterator[Passes]:
    backward = [is_backward(graph, step) for step in block.steps]
    if not any(is_back and _computes(step) for step, is_back in zip(block.steps, backward, strict=True)):
        for step in block.steps:
            if isinstance(step, Region) and step.equation.primitive.name == "scan":
                yield from _passes_of_block(graph, step.blocks[0], _ids(step.blocks[0].outputs), step)
        return
    first = backward.index(True)
    is_after: set[int] = set()  # values that depend on the backward pass
    forward, pinned = [], set(ends)
    for i, (step, is_back) in enumerate(zip(block.steps, backward, strict=True)):
        read = {v.id for v in values_read(step)}
        if is_back or read & is_after:
            is_after.update(v.id for v in results_of(step))
        if is_back:
            continue
        if i < first:
            forward.append(step)
        else:
            pinned |= read
    pairs = _scan_pairs(graph, block, ends)
    steps = tuple(step for step, is_back in zip(block.steps, backward, strict=True) if is_back)
    yield Passes(tuple(forward), steps, frozenset(pinned), around=around)
    for pair in pairs:
        body, back = pair.forward.blocks[0], pair.backward.blocks[0]
        length = int(pair.forward.equation.params["length"])
        yield Passes(tuple(body.steps), tuple(back.steps), frozenset(), pair, length, pair.forward)


def _computes(step: Step) -> bool:
    """Returns whether a step makes a backward pass: a transposition, say, may also follow a loop that has the pass."""
    return isinstance(step, Region) or is_contraction(step)


def _ids(operands: Iterable[Operand]) -> set[int]:
    return {o.id for o in operands if isinstance(o, Value)}


def _scan_pairs(graph: Graph, block: Block, ends: set[int]) -> list[ScanPair]:
    """Returns the pairs of scans of a block, each scan in one pair at most."""
    scans = [s for s in block.steps if isinstance(s, Region) and s.equation.primitive.name == "scan"]
    maker = {
        s.results[i].id: s for s in scans if not is_backward(graph, s) for i in range(len(s.carries), len(s.results))
    }
    consumers = graph.consumers()
    pairs, taken = [], set()
    for scan in scans:
        if not is_backward(graph, scan):
            continue
        by_forward: dict[int, tuple[Region, dict[int, Value]]] = {}
        for piece in scan.slices:
            stack = piece.operands[0]
            if not isinstance(stack, Value) or stack.id not in maker or stack.id in ends:
                continue
            source = maker[stack.id]
            inner = graph.vertices[stack.vertex].operands[0]
            readers = {reader.index for reader, _ in consumers[stack.id]}
            if not isinstance(inner, Value) or not readers <= {s.index for s in scan.slices}:
                continue
            if source.equation.params["length"] == scan.equation.params["length"]:
                by_forward.setdefault(step_key(source), (source, {}))[1][piece.results[0].id] = inner
        free = {key: pair for key, pair in by_forward.items() if key not in taken}
        if free:
            key, (source, aliases) = max(free.items(), key=lambda item: len(item[1][1]))
            taken.add(key)
            pairs.append(ScanPair(source, scan, aliases))
    return pairs


def backward_reads(passes: Passes) -> list[tuple[int, Value]]:
    """Returns (position in `backward`, forward value) for everything that the backward pass reads, in order."""
    aliases = {} if passes.pair is None else passes.pair.aliases
    reads = []
    for position, step in enumerate(passes.backward):
        reads += [(position, aliases.get(v.id, v)) for v in values_read(step)]
    if passes.pair is not None:  # what the body hands on as it is
        reads += [
            (len(passes.backward), aliases[i]) for i in _ids(passes.pair.backward.blocks[0].outputs) & set(aliases)
        ]
    return reads


def made_by(steps: Sequence[Step]) -> dict[int, Step]:
    """Returns the step that makes each value, by the value's id."""
    return {value.id: step for step in steps for value in results_of(step)}
