"""Finds the forward and the backward pass of a differentiated training step.

JAX writes into the name stack of each equation which transformations made it: the equations of a backward pass stand in
`transpose(...)`. So a finished training step can be divided without its author's help: what is in `transpose(...)` is
backward, what depends on none of it is forward, and the rest, such as an optimiser's update, comes after both. The two
passes of a scan over layers are two scans; the second one reads the first one's stacked results.

Steps of the forward pass that run again are divided into regions: the parts between which only kept values go.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from search_spaces.replay import REMAT
from search_spaces.sharding.fusion import PICKS
from search_spaces.sharding.graph import Block, Graph, Region, Step, Value, Vertex, is_contraction, values_of

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


def is_backward(graph: Graph, step: Step) -> bool:
    """Returns whether a step belongs to a backward pass."""
    if isinstance(step, Vertex):
        return _BACKWARD in step.scope
    if step.equation.primitive.name in REMAT or not step.results:
        return any(_BACKWARD in v.scope for v in vertices_of(step))
    return _BACKWARD in graph.vertices[step.results[0].vertex].scope


def passes_of(graph: Graph) -> list[Passes]:
    """Returns the forward and backward passes of a function: of its own steps, of loops, and of pairs of scans."""
    return list(_passes_of_block(graph, graph.block, None))


def _passes_of_block(graph: Graph, block: Block, around: Region | None) -> Iterator[Passes]:
    backward = [is_backward(graph, step) for step in block.steps]
    if not any(is_back and _computes(step) for step, is_back in zip(block.steps, backward, strict=True)):
        for step in block.steps:
            if isinstance(step, Region) and step.equation.primitive.name == "scan":
                yield from _passes_of_block(graph, step.blocks[0], step)
        return
    first, ends = backward.index(True), {v.id for v in values_of(block.outputs)}
    is_after: set[int] = set()  # values that depend on the backward pass
    forward, pinned = [], set(ends)
    for i, (step, is_back) in enumerate(zip(block.steps, backward, strict=True)):
        read = {v.id for v in values_of(step.operands)}
        if is_back or read & is_after:
            is_after.update(v.id for v in step.results)
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
        reads += [(position, aliases.get(v.id, v)) for v in values_of(step.operands)]
    if passes.pair is not None:  # what the body hands on as it is
        handed_on = {v.id for v in values_of(passes.pair.backward.blocks[0].outputs)}
        reads += [(len(passes.backward), aliases[i]) for i in handed_on & set(aliases)]
    return reads


def made_by(steps: Sequence[Step]) -> dict[int, Step]:
    """Returns the step that makes each value, by the value's id."""
    return {value.id: step for step in steps for value in step.results}


@dataclass
class RunAgain:
    """A region of steps that run again.

    Attributes:
      inputs: what it reads.
      outputs: what it leaves for the backward pass.
      position: of the first step of the backward pass that reads something of it.
      around: the loop in whose body the steps are.
      trigger: what it waits for.
    """

    steps: list[Step]
    inputs: list[Value]
    outputs: list[Value]
    position: int
    around: Region | None
    trigger: Value | None = None


def first_reads(reads: Iterable[tuple[int, Value]]) -> dict[int, int]:
    """Returns the first position at which each value is read, by the value's id."""
    first: dict[int, int] = {}
    for position, value in reads:
        first[value.id] = min(position, first.get(value.id, position))
    return first


def regions_of(
    passes: Passes, recomputed: frozenset[int], other_reads: Sequence[tuple[int, Value]] = ()
) -> list[RunAgain]:
    """Divides the steps that run again into regions between which only kept values go.

    A region is a part of the forward pass that no kept value divides, such as a layer. What is made of arguments
    without any product, such as a mask or a parameter in another type, does not join two parts to one: each computes it
    for itself.

    Args:
      recomputed: keys of the steps that run again.
      other_reads: what is read for the backward pass beside what `backward_reads` says, with positions in it.
    """
    steps = [step for step in passes.forward if step_key(step) in recomputed]
    maker, free = made_by(steps), _free_steps(passes)
    reads = first_reads((*backward_reads(passes), *other_reads))
    demanded = {value: position for value, position in reads.items() if value in maker}
    root = _joined(steps, maker, free)
    values = {v.id: v for step in steps for v in step.results}
    members: dict[int, list[Value]] = defaultdict(list)  # the demanded values of each region
    for value in demanded:
        members[root[step_key(maker[value])]].append(values[value])
    closures = {key: _closure(outputs, maker) for key, outputs in members.items()}

    def first_read(key: int) -> int:
        return min(demanded[v.id] for v in members[key])

    for key in [key for key in members if key in free]:  # what one region alone needs is left by it, if early enough
        users = [other for other, closure in closures.items() if other != key and key in closure]
        if len(users) == 1 and users[0] in members and first_read(users[0]) <= first_read(key):
            members[users[0]] += members.pop(key)
    regions = []
    for outputs in members.values():
        keys = _closure(outputs, maker)
        inside = [step for step in steps if step_key(step) in keys]
        own = {v.id for step in inside for v in step.results}
        inputs = {v.id: v for step in inside for v in values_of(step.operands) if v.id not in own}
        outputs = sorted(outputs, key=lambda v: v.id)
        position = min(demanded[v.id] for v in outputs)
        regions.append(RunAgain(inside, list(inputs.values()), outputs, position, passes.around))
    return regions


def _free_steps(passes: Passes) -> set[int]:
    """Returns the keys of steps that are made of arguments without any product, lookup or loop, such as a mask."""
    made = made_by(passes.forward)
    carried = set() if passes.pair is None else {c.results[0].id for c in passes.pair.forward.carries}
    free: set[int] = set()
    for step in passes.forward:
        read = [v.id for v in values_of(step.operands)]
        is_cheap = isinstance(step, Vertex) and not is_contraction(step) and step.primitive not in PICKS
        if is_cheap and not any(v in carried or (v in made and step_key(made[v]) not in free) for v in read):
            free.add(step_key(step))
    return free


def _joined(steps: Sequence[Step], maker: Mapping[int, Step], free: set[int]) -> dict[int, int]:
    """Returns for each step, by key, the key of the first step of its region; a free step is a region of its own."""
    root = {step_key(step): step_key(step) for step in steps}

    def find(key: int) -> int:
        while root[key] != key:
            key = root[key]
        return key

    for step in steps:
        own = step_key(step)
        others = {step_key(maker[v.id]) for v in values_of(step.operands) if v.id in maker}
        for other in () if own in free else others - free:
            root[find(own)] = find(other)
    return {key: find(key) for key in root}


def _closure(values: Sequence[Value], maker: Mapping[int, Step]) -> set[int]:
    """Returns the keys of the steps that run again to make some values."""
    keys: set[int] = set()
    waiting = [v.id for v in values]
    while waiting:
        value = waiting.pop()
        if value in maker and step_key(maker[value]) not in keys:
            keys.add(step_key(maker[value]))
            waiting += [v.id for v in values_of(maker[value].operands)]
    return keys


def goes_on_from(steps: Sequence[Step], position: int, carries: Sequence[Vertex] = ()) -> Value | None:
    """Returns the largest array, made before a step or carried into the loop, that it, or else a later one, reads."""
    made = {*made_by(steps[:position]), *(carry.results[0].id for carry in carries)}
    for step in steps[position:]:
        before = [v for v in values_of(step.operands) if v.id in made and v.shape]
        if before:
            return max(before, key=lambda v: v.num_bytes)
    return None
