"""What one kernel of a compiled program does, and the rates at which GPUs in hosts do it.

A kernel has its matrix products' operations, and the bytes that it moves. A fusion is one kernel, and what it moves is
less than its operands: a parameter of which only a slice is used is read in that slice, and a buffer that is updated in
place is neither read nor written outside the update. So the share of every array that is needed is followed from the
fusion's result back to its parameters.

A datasheet's rate is not what a kernel reaches, so a timeline is priced at the share of it that a `Hardware` names.
Links come in two classes: those inside a host and those between hosts. A group of devices that stays in a host takes
the first; one with a single device in each host takes the second; a ring over several devices in several hosts takes
both.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cost.base import AttentionWork, CollectiveKind, Hardware
from cost.collectives import collective_s
from cost.networks import SwitchedHost
from diffshard.checks.collectives import bits_of_dtype
from diffshard.checks.hlo import Computation, Instruction, Module, arrays, parts_of_tuple, size

# Instructions that start no kernel: names for buffers, and constants.
_FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "add-dependency")
)
# The result has the first operand's entries at places that the other operands tell.
_SELECT = ("slice", "dynamic-slice", "gather")
_CONTRACTED_DIMS = re.compile(r"lhs_contracting_dim(?:ension)?s\"?[=:][{\[]([\d,\"]*)[}\]]")
_DIM_LABELS = re.compile(r"dim_labels=\w+_(\w+)->\w+")
_PAIRS = re.compile(r'"intermediate_tensor_shape": ?{[^{}]*"dimensions": ?\[([\d", ]*)\]')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PREFIXES = (("bf", "bfloat"), ("f8", "float8_"), ("f4", "float4_"), ("f", "float"), ("c", "complex"), ("s", "int"))


class KernelWork(NamedTuple):
    """The work of one kernel on one device.

    Attributes:
      flops: operations of matrix products and convolutions by the dtype that they run in; a multiply-add counts as two.
      num_bytes: read from and written to the device's memory.
      is_known: whether all of its arithmetic was recognised; the operations inside a custom call may not be.
      attention: the same as a call of fused attention, where it is one.
    """

    flops: Mapping[str, float]
    num_bytes: float
    is_known: bool = True
    attention: AttentionWork | None = None


def kernel_work(module: Module, computation: Computation, instruction: Instruction) -> KernelWork | None:
    """Counts the work of one instruction of a scheduled program.

    Operations on single elements are not counted: on GPUs they take less time than moving their operands.

    Args:
      instruction: a fusion, a custom call or a single operation, but no collective, loop, conditional or call.

    Returns:
      The work, or None for an instruction that starts no kernel.
    """
    if instruction.opcode in _FREE:
        return None
    if instruction.opcode == "custom-call":
        return _custom_call(computation, instruction)
    flops: dict[str, float] = defaultdict(float)
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.callees[0]]
        shares = _shares(module, inner, 1.0, in_place=True)
        num_bytes = sum(shares[name] * num_bytes_of(inner.by_name[name].type) for name in inner.parameters.values())
        for part in _result_parts(inner):
            num_bytes += _written_bytes(inner, part)
        _add_flops(module, inner, shares, flops)
        return KernelWork(dict(flops), num_bytes)
    num_bytes = _written_bytes(computation, instruction)
    for operand, share in dict(_demands(module, computation, instruction, 1.0, in_place=True)).items():
        num_bytes += min(1.0, share) * num_bytes_of(computation.by_name[operand].type)
    if instruction.opcode in ("dot", "convolution"):
        flops[_product_dtype(computation, instruction)] = _product_flops(computation, instruction)
    return KernelWork(dict(flops), num_bytes)


def num_bytes_of(type_: str) -> float:
    """Counts the bytes of an array's type, or of all parts of a tuple's."""
    return sum(size(dims) * bits_of_dtype(dtype) / 8 for dtype, dims in arrays(type_))


def dtype_name(hlo_dtype: str) -> str:
    """Returns the name that JAX gives an HLO type: "bf16" is "bfloat16", "s8" is "int8"."""
    if hlo_dtype == "pred":
        return "bool"
    for prefix, name in _PREFIXES:
        if hlo_dtype.startswith(prefix):
            return name + hlo_dtype[len(prefix) :]
    return hlo_dtype.replace("u", "uint", 1)


def custom_call_target(instruction: Instruction) -> str:
    """Returns the library function that a custom call runs."""
    target = _TARGET.search(instruction.attributes)
    return target[1] if target else ""


def _shares(module: Module, computation: Computation, share: float, *, in_place: bool) -> Mapping[str, float]:
    """Returns the share of each result's entries that `share` of the computation's result needs, at most 1."""
    shares: dict[str, float] = defaultdict(float)
    slice_shares: dict[str, float] = defaultdict(float)
    in_place_names = set()
    for part in _result_parts(computation):
        shares[part.name] = share
        if in_place:
            in_place_names.add(_behind_bitcasts(computation, part).name)
    for instruction in reversed(computation.instructions):
        needed_share = shares[instruction.name] = min(1.0, shares[instruction.name] + slice_shares[instruction.name])
        if instruction.is_root and instruction.opcode == "tuple":
            continue
        in_order = instruction.opcode not in _SELECT
        updates = instruction.name in in_place_names
        for operand, part in _demands(module, computation, instruction, needed_share, in_place=updates):
            # Readers in the same order share what they read; slices are of different places.
            if in_order:
                shares[operand] = max(shares[operand], part)
            else:
                slice_shares[operand] += part
    return shares


def _demands(
    module: Module, computation: Computation, instruction: Instruction, share: float, *, in_place: bool
) -> Iterator[tuple[str, float]]:
    """Yields operands with the share of them that `share` of the instruction's result needs."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "fusion":
        inner = module.computations[instruction.callees[0]]
        shares = _shares(module, inner, share, in_place=False)
        yield from ((operands[number], shares[name]) for number, name in inner.parameters.items())
        return
    for index, operand in enumerate(operands):
        num_elements = computation.by_name[operand].num_elements if operand in computation.by_name else 0
        ratio = instruction.num_elements / num_elements if num_elements else 1.0
        if index == 0 and opcode in ("dynamic-update-slice", "scatter"):
            replaced_share = _update_elements(computation, instruction) / max(1, instruction.num_elements)
            yield operand, 0.0 if in_place else share * max(0.0, 1 - replaced_share if opcode != "scatter" else 1.0)
        elif opcode in ("dot", "convolution"):
            yield operand, float(share > 0)
        elif index == 0 and opcode in _SELECT:
            yield operand, share * ratio
        elif opcode in ("concatenate", "pad", "dynamic-update-slice", "scatter", *_SELECT):
            yield operand, share
        else:
            yield operand, share * max(1.0, ratio)


def _result_parts(computation: Computation) -> list[Instruction]:
    root = next(i for i in reversed(computation.instructions) if i.is_root)
    if root.opcode != "tuple":
        return [root]
    return [computation.by_name[name] for name in root.operands if name in computation.by_name]


def _behind_bitcasts(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast" and instruction.operands[0] in computation.by_name:
        instruction = computation.by_name[instruction.operands[0]]
    return instruction


def _written_bytes(computation: Computation, part: Instruction) -> float:
    """Counts the bytes to write a result: an update in place writes itself only, a scatter reads that as well."""
    writer = _behind_bitcasts(computation, part)
    if writer.opcode not in ("dynamic-update-slice", "scatter"):
        return num_bytes_of(part.type)
    updates = _updates(writer)
    num_bytes = sum(num_bytes_of(computation.by_name[name].type) for name in updates if name in computation.by_name)
    return num_bytes * (2 if writer.opcode == "scatter" else 1)


def _updates(instruction: Instruction) -> tuple[str, ...]:
    """Returns the operands of an update that hold the new entries."""
    if instruction.opcode == "dynamic-update-slice":
        return instruction.operands[1:2]
    return instruction.operands[len(instruction.operands) // 2 + 1 :]


def _update_elements(computation: Computation, instruction: Instruction) -> int:
    return sum(computation.by_name[n].num_elements for n in _updates(instruction) if n in computation.by_name)


def _add_flops(module: Module, computation: Computation, shares: Mapping[str, float], flops: dict[str, float]) -> None:
    for instruction in computation.instructions:
        if not shares[instruction.name]:
            continue
        if instruction.opcode in ("dot", "convolution"):
            flops[_product_dtype(computation, instruction)] += _product_flops(computation, instruction)
        elif instruction.opcode == "fusion":
            inner = module.computations[instruction.callees[0]]
            _add_flops(module, inner, _shares(module, inner, 1.0, in_place=False), flops)


def _product_dtype(computation: Computation, instruction: Instruction) -> str:
    """Returns the wider of the operands' types: a product of bfloat16 summed in float32 runs at bfloat16's rate."""
    types = [arrays(computation.by_name[name].type)[0][0] for name in instruction.operands[:2]]
    return dtype_name(max(types, key=bits_of_dtype))


def _product_flops(computation: Computation, instruction: Instruction) -> float:
    """Counts operations of a matrix product or convolution; those of a convolution on padding are counted as well."""
    dims = [_dims(computation.by_name[name].type) for name in instruction.operands[:2]]
    if instruction.opcode == "dot":
        return 2.0 * instruction.num_elements * _contracted_size(instruction, dims[0])
    return _convolution_flops(instruction, _dims(instruction.type), dims[1])


def _contracted_size(instruction: Instruction, dims: list[int]) -> int:
    match = _CONTRACTED_DIMS.search(instruction.attributes)
    return math.prod(dims[int(d)] for d in re.findall(r"\d+", match[1])) if match else 1


def _convolution_flops(instruction: Instruction, output: list[int], kernel: list[int]) -> float:
    """Counts a convolution's operations: an output entry sums over the kernel's entries of one output feature."""
    labels = _DIM_LABELS.search(instruction.attributes)
    features = kernel[labels[1].index("o")] if labels else 1
    return 2.0 * math.prod(output) * math.prod(kernel) / features


def _attention_flops(instruction: Instruction, operands: list[str], pairs: re.Match[str]) -> float:
    """Counts cuDNN's attention: two products forward, five backward, of `[batch, heads, queries, keys]` pairs."""
    *batch, length, key_length = (int(n) for n in re.findall(r"\d+", pairs[1]))
    products = 5 if "Backward" in custom_call_target(instruction) else 2
    is_half = "CAUSAL" in instruction.attributes and length == key_length
    return (0.5 if is_half else 1.0) * 2.0 * products * math.prod(batch) * length * key_length * _dims(operands[0])[-1]


def _dims(type_: str) -> list[int]:
    """Returns the sizes of an array, or of the first one in a tuple."""
    return [int(d) for d in arrays(type_)[0][1].split(",") if d]


def _custom_call(computation: Computation, instruction: Instruction) -> KernelWork:
    """Counts cuBLAS's products, cuDNN's convolutions and attention; others by bytes.

    The results of products and convolutions stand beside scratch memory, which is not counted.
    """
    operands = [computation.by_name[name].type for name in instruction.operands if name in computation.by_name]
    result = parts_of_tuple(instruction.type)[0]
    target = custom_call_target(instruction)
    is_library = target.startswith(("__cublas", "__cudnn$conv"))
    result_type = result if is_library else instruction.type
    num_bytes = sum(map(num_bytes_of, operands)) + num_bytes_of(result_type)
    if target.startswith("__cudnn$fmha") and (pairs := _PAIRS.search(instruction.attributes)):
        dtype, flops = dtype_name(arrays(operands[0])[0][0]), _attention_flops(instruction, operands, pairs)
        queries, is_forward = float(math.prod(_dims(operands[0])[:-1])), "Backward" not in target
        attention = AttentionWork(flops, num_bytes, dtype, queries, is_forward)
        return KernelWork({dtype: flops}, num_bytes, attention=attention)
    if not is_library or len(operands) < 2:
        return KernelWork({}, num_bytes, is_known=False)
    dtype = dtype_name(max((arrays(type_)[0][0] for type_ in operands[:2]), key=bits_of_dtype))
    if target.startswith("__cublas"):
        flops = 2.0 * math.prod(_dims(result)) * _contracted_size(instruction, _dims(operands[0]))
        return KernelWork({dtype: flops}, num_bytes)
    # Source: XLA's cuDNN custom calls keep the forward convolution's labels; the operands are (input, kernel), the
    # gradient and the kernel, or the input and the gradient.
    forward = {"__cudnn$convBackwardInput": (operands[0], operands[1])}
    forward["__cudnn$convBackwardFilter"] = (operands[1], result)
    output, kernel = forward.get(target, (result, operands[1]))
    return KernelWork({dtype: _convolution_flops(instruction, _dims(output), _dims(kernel))}, num_bytes)


INSIDE_HOST = "links inside a host"
BETWEEN_HOSTS = "links between hosts"
HOST_MEMORY = "link to host memory"

# What one GPU of an HGX H100 sends: NVLink at 80% of 450 GB/s, and its own InfiniBand card at 90% of 50 GB/s.
# Latencies are those of NCCL's tuning model, as in `cost.presets`.
H100_HOST = SwitchedHost(8, 360e9, 8 * 45e9, launch_s=14e-6, hop_s=1.9e-6, network_hop_s=4e-6)
# PCI Express 5.0 with 16 lanes has 63 GB/s; copies to pinned memory reach about 80% of it.
HOST_MEMORY_BYTES_PER_S = 50e9


@dataclass(frozen=True)
class AchievableRates:
    """The rates that one device and its links reach.

    Attributes:
      device: rates of arithmetic by dtype and of memory, what kernels reach of them, and what a launch takes; its links
        are not used.
      host: the devices that share a host, and the rates inside and between hosts. Devices are numbered row-major over
        the mesh, and each `host.num_devices` neighbours in that order share a host.
      host_memory_bytes_per_s: of copies between the device's and the host's memory.
    """

    device: Hardware
    host: SwitchedHost = H100_HOST
    host_memory_bytes_per_s: float = HOST_MEMORY_BYTES_PER_S

    def kernel_s(self, flops: Mapping[str, float], num_bytes: float) -> float:
        """Returns a kernel's seconds by roofline: launch, and the slower of its arithmetic and its memory traffic."""
        arithmetic_s = sum(count / self.device.reached_flops_per_s(dtype) for dtype, count in flops.items())
        return self.device.kernel_launch_s + max(arithmetic_s, num_bytes / self.device.reached_memory_bytes_per_s)

    def collective_s(self, kind: CollectiveKind, num_bytes: float, groups: Sequence[Sequence[int]]) -> float:
        """Returns seconds of one collective alone on its links.

        Args:
          num_bytes: the full size within one group, as `cost.collectives` counts it.
          groups: devices that take part together; for a permute pairs of source and target.
        """
        size, members, _ = self._widest(groups)
        if kind == "collective_permute":
            size, members = 2, 2 if members == 2 else 1
        link = self.host.link(size, max(1, self.host.num_devices // members))
        return float(collective_s(kind, num_bytes, size, link))

    def links(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """Returns the classes of links that a collective over these groups takes."""
        _, members, num_hosts = self._widest(groups)
        inside = (INSIDE_HOST,) if members > 1 else ()
        return (*inside, BETWEEN_HOSTS) if num_hosts > 1 else (INSIDE_HOST,)

    def _widest(self, groups: Sequence[Sequence[int]]) -> tuple[int, int, int]:
        """Returns (devices, most devices in one host, hosts) of the group that spans the most hosts."""
        extents = []
        for group in groups:
            hosts = Counter(device // self.host.num_devices for device in set(group))
            extents.append((len(set(group)), max(hosts.values()), len(hosts)))
        return max(extents, key=lambda extent: (extent[2], -extent[1]))


def achievable_rates(hardware: Hardware, *, host: SwitchedHost = H100_HOST) -> AchievableRates:
    """Returns the rates at which programs run.

    Args:
      hardware: the device's rates and the shares of them that programs reach.
      host: the links, with the rates that collectives reach.
    """
    return AchievableRates(hardware, host)
