"""All-reduces of which each device keeps a slice: reduce-scatters, as the CPU backend writes them."""

from diffshard.checks.hlo import Computation, Instruction, Module

_IN_PLACE = frozenset({"bitcast", "copy", "convert", "reshape", "transpose", "all-reduce-done"})


def sliced_elements(module: Module, computation: Computation, reduced: Instruction, num_devices: int) -> int:
    """How many entries of an all-reduce's results are used only as the slice that belongs to the device.

    Args:
      module: the whole program.
      computation: where the all-reduce is.
      reduced: the all-reduce.
      num_devices: in its group: a slice is that much smaller than what it is taken from.

    Returns:
      Entries of the results that are all sliced; 0 where whole results are used.
    """
    if not reduced.type.startswith("("):
        return reduced.num_elements if _only_sliced(module, [], computation, reduced, num_devices) else 0
    total = 0
    for user in computation.users[reduced.name]:
        if user.opcode == "get-tuple-element" and _only_sliced(module, [], computation, user, num_devices):
            total += user.num_elements
    return total


_Callers = list[tuple[Computation, Instruction]]


def _only_sliced(
    module: Module, callers: _Callers, computation: Computation, value: Instruction, num_devices: int
) -> bool:
    users = computation.users[value.name]
    if not users or value.is_root:
        return False
    for user in users:
        if user.opcode == "dynamic-slice":
            if user.operands[0] != value.name or user.num_elements * num_devices != value.num_elements:
                return False
            if not any(_is_by_device(module, callers, computation, index) for index in user.operands[1:]):
                return False
        elif user.opcode in _IN_PLACE:
            if not _only_sliced(module, callers, computation, user, num_devices):
                return False
        elif user.opcode == "fusion":
            fused = _called(module, user)
            inside = [*callers, (computation, user)]
            for number, operand in enumerate(user.operands):
                parameter = fused.by_name[fused.parameters[number]]
                if operand == value.name and not _only_sliced(module, inside, fused, parameter, num_devices):
                    return False
        else:
            return False
    return True


def _is_by_device(module: Module, callers: _Callers, computation: Computation, name: str) -> bool:
    """Whether a scalar is computed from the device's number; a loop may have been handed it in its state."""
    numbers = {parameter: number for number, parameter in computation.parameters.items()}
    waiting, seen = [name], {name}
    while waiting:
        value = computation.by_name[waiting.pop()]
        if value.opcode == "partition-id" or (value.opcode == "get-tuple-element" and value.type.startswith("u32[]")):
            return True
        if value.opcode == "parameter" and callers:
            (outer, call), above = callers[-1], callers[:-1]
            if _is_by_device(module, above, outer, call.operands[numbers[value.name]]):
                return True
        elif value.num_elements == 1:
            new = [operand for operand in value.operands if operand not in seen]
            seen.update(new)
            waiting.extend(new)
    return False


def _called(module: Module, fusion: Instruction) -> Computation:
    name = fusion.attributes.split("calls=", 1)[1].lstrip("%")
    return module.computations[name.split(",", 1)[0].split(" ", 1)[0]]
