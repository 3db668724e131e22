"""A plan by layer: the modules of the user's code in the order in which they run, equal ones told once."""

import statistics
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from diffshard.plans.base import Operation, PlanData, Spec
from diffshard.plans.patterns import group_names, readable_path
from diffshard.plans.text import device_bytes, format_array, module_path, result_type

_SMALL = 0.03  # of a layer's time: operations below are told together


class Part(NamedTuple):
    """Something sharded in a layer: an argument, an operation, or several that are alike.

    Attributes:
      name: without the layer's own name.
      spec: how it is split; None for what stands for small operations of all kinds.
      array: its type.
      times: how many, in one layer.
      seconds: of all of them in one layer and step.
      num_bytes: a device's bytes of all of them, for arguments.
      collectives: "kind axis" of the communication that they cause.
      source: file and line of the first.
    """

    name: str
    spec: Spec | None
    array: str
    times: int
    seconds: float
    num_bytes: float
    collectives: tuple[str, ...]
    source: str


class Layer(NamedTuple):
    """A layer, or several of equal content.

    Attributes:
      name: pattern of its modules, such as `GPT/layer_*`.
      times: how many layers it stands for.
      arguments, forward, backward: its parts.
      compute_s, collective_s: of one of them in one step.
    """

    name: str
    times: int
    arguments: tuple[Part, ...]
    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    compute_s: float
    collective_s: float


class _Step(NamedTuple):
    """What each operation costs: seconds of its communication, and the kinds of it."""

    plan: PlanData
    collective_s: list[float]
    collectives: list[tuple[str, ...]]

    def seconds(self, index: int) -> float:
        return self.plan.operations[index].compute_s + self.collective_s[index]


def layers(plan: PlanData) -> list[Layer]:
    """The layers of a plan in the order of their forward passes; what is in no module comes by its role."""
    step = _step(plan)
    members: dict[str, tuple[list[int], list[int]]] = {}
    for i, operation in enumerate(plan.operations):
        if operation.kind != "input":
            name, is_backward = layer_name(operation)
            members.setdefault(name, ([], []))[is_backward].append(i)
    arguments = _arguments_of(plan, list(members))
    found = []
    for name in [*members, *(name for name in arguments if name not in members)]:
        forward, backward = members.get(name, ([], []))
        own = arguments.get(name, [])
        layer = Layer(
            name,
            1,
            _argument_parts(step, own, name),
            _operation_parts(step, forward, name),
            _operation_parts(step, backward, name),
            sum(plan.operations[i].compute_s for i in (*forward, *backward)),
            sum(step.collective_s[i] for i in (*forward, *backward, *own)),
        )
        if layer.compute_s or layer.collective_s or layer.arguments:
            found.append(layer)
    middle = {name: statistics.median(forward or backward) for name, (forward, backward) in members.items()}
    return _told_once(sorted(found, key=lambda layer: middle.get(layer.name, -1)))


def layer_name(operation: Operation) -> tuple[str, bool]:
    """The layer that an operation belongs to (its two outermost modules), and whether it runs backward."""
    modules, is_backward = module_path(operation)
    if operation.scope and modules and modules[0] in operation.scope:
        return "/".join(modules[:2]), is_backward
    return ("loss" if "jvp(" in operation.scope else "update"), is_backward


def _step(plan: PlanData) -> _Step:
    seconds = [0.0] * len(plan.operations)
    kinds: list[dict[str, None]] = [{} for _ in plan.operations]
    for c in plan.collectives:
        seconds[c.operation] += c.seconds
        kinds[c.operation][f"{c.kind} {c.axis}"] = None
    return _Step(plan, seconds, [tuple(k) for k in kinds])


def _arguments_of(plan: PlanData, names: Sequence[str]) -> dict[str, list[int]]:
    """Arguments by the layer whose innermost module is in their path, else by their first name."""
    by_module = {name.split("/")[-1]: name for name in reversed(names)}
    found: dict[str, list[int]] = {}
    for i, tensor in enumerate(plan.arguments):
        parts = readable_path(tensor.path).split("/")
        name = next((by_module[p] for p in parts[1:] if p in by_module), None)
        if name is None:  # `embed` holds what `embed.attend` reads
            name = next((by_module[m] for p in parts[1:] for m in by_module if m.startswith(f"{p}.")), None)
        found.setdefault(name or "arguments", []).append(i)
    return found


def _argument_parts(step: _Step, members: Sequence[int], layer: str) -> tuple[Part, ...]:
    tensors = [step.plan.arguments[i] for i in members]
    last = layer.split("/")[-1]
    names = [readable_path(t.path).replace(f"/{last}/", "/") for t in tensors]
    keys = [(t.spec, format_array(t)) for t in tensors]
    parts = []
    for group in group_names(names, keys):
        spec, array = keys[group.members[0]]
        indices = [members[m] for m in group.members]
        size = sum(device_bytes(step.plan, step.plan.arguments[i]) for i in indices)
        kinds = dict.fromkeys(kind for i in indices for kind in step.collectives[i])
        seconds = sum(step.collective_s[i] for i in indices)
        parts.append(Part(group.pattern, spec, array, len(indices), seconds, size, tuple(kinds), ""))
    return tuple(parts)


def _operation_parts(step: _Step, members: Sequence[int], layer: str) -> tuple[Part, ...]:
    """Parts in program order; those that take little are told as one at the end."""
    operations = step.plan.operations
    costly = [i for i in members if operations[i].results and step.seconds(i) > 0]
    keys: list[tuple[Spec, str, tuple[str, ...]]] = [
        (operations[i].value_specs[0], result_type(operations[i]), step.collectives[i]) for i in costly
    ]
    groups = group_names([_short(operations[i], layer) for i in costly], keys)
    least = _SMALL * sum(step.seconds(i) for i in costly)
    parts, small = [], []
    for group in groups:
        indices = [costly[m] for m in group.members]
        seconds = sum(step.seconds(i) for i in indices)
        spec, array, collectives = keys[group.members[0]]
        if seconds < least and not collectives:
            small += indices
            continue
        source = operations[indices[0]].source
        parts.append(Part(group.pattern, spec, array, len(indices), seconds, 0.0, collectives, source))
    if small:
        parts.append(Part("small operations", None, "", len(small), sum(map(step.seconds, small)), 0.0, (), ""))
    return tuple(parts)


def _short(operation: Operation, layer: str) -> str:
    modules, _ = module_path(operation)
    inner = modules[len(layer.split("/")) :] if "/".join(modules).startswith(layer) else modules
    return "/".join((*inner, operation.signature.split("(", 1)[0]))


def _told_once(found: Sequence[Layer]) -> list[Layer]:
    keys = [_content(layer) for layer in found]
    groups = group_names([layer.name for layer in found], keys)
    return [found[g.members[0]]._replace(name=g.pattern, times=len(g.members)) for g in groups]


def _content(layer: Layer) -> Hashable:
    """What two layers must share to be told as one; times only to three digits."""

    def plain(parts: Sequence[Part]) -> Hashable:
        return tuple((*p[:4], f"{p.seconds:.3g}", *p[5:7]) for p in parts)

    return plain(layer.arguments), plain(layer.forward), plain(layer.backward)
