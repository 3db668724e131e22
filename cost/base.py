"""The vocabulary of costs: problems and what a choice costs, hardware and its links, work, collectives, cost models.

Letters for sizes: V nodes, S_v strategies of node v, E edges, K usages, D devices that differ from each other, R loads,
A amounts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from cost.lines import Line
from cost.measured_rates import NOT_MEASURED, MeasuredRates
from cost.real_numbers import Count, Range, Share, checked_number

FORBIDDEN = 10**18
"""Costs from here on, infinity included, stand for what must not be chosen (IOPDDL's convention)."""
LARGEST_S = 1e9
"""Seconds, 30 years: no operation, byte, latency or launch takes longer, so that no product with sizes overflows."""


def _rate(most: float) -> Any:
    rule = f"a positive number (at most {most}; at least {1 / LARGEST_S}; inf costs nothing)"
    return Annotated[float, Range(1 / LARGEST_S, most, rule)]


_RATE, _REACHED_SHARE = _rate(math.inf), _rate(1)
_SECONDS = Annotated[
    float, Range(0, LARGEST_S, f"a finite number of seconds, zero or more and at most {LARGEST_S:.0e}")
]


class Problem(NamedTuple):
    """Costs of nodes and edges, loads of which the largest count, memory over time, and amounts within limits.

    A choice is one strategy index for each node, `[V]` integers. Node and edge costs, loads and amounts are sums over
    what it chooses, and with the groups g of loads r it costs

        Σ node costs + Σ edge costs + Σ_g max_(r in g) load_r,

    while at every time the chosen usages that are live must fit the memory limit, and every amount its own limit.
    Costs are in seconds and usages in bytes for our own spaces; contest instances have units of their own. Costs from
    `FORBIDDEN` (1e18) on are not costs: they mark what must not be chosen, so scale larger ones down.

    Attributes:
      node_cost: V arrays `[S_v]`.
      edge_nodes: `[E, 2]` integers, the two ends u, v of each edge; u != v.
      edge_cost: E arrays `[S_u, S_v]`; edges with equal matrices may share one array.
      usage_node: `[K]` integers, the node that each usage belongs to; a node may have none or several.
      usage: K arrays `[S_v]` (the same on all devices) or `[S_v, D]`.
      usage_interval: `[K, 2]` integers, half-open `[start, end)` times at which the usage is live.
      memory_limit: a number, or `[D]` where devices differ; `inf` means no limit.
      load: V arrays `[S_v, R]`, such as seconds of each device's time, or `()` where nothing is a maximum; one that is
        forbidden forbids the strategy.
      edge_load: E arrays `[S_u, S_v, R]` of what edges add to the loads, all finite, or `()`.
      load_group: `[R]` the group that each load is in, 0 and up; of each group the largest load counts. Without
        numbers, all loads are one group.
      amount: V arrays `[S_v, A]` of what must keep limits of its own, such as a loss or a number of devices; or `()`.
      edge_amount: E arrays `[S_u, S_v, A]` of what edges add to the amounts, or `()`.
      amount_limit: `[A]`.
    """

    node_cost: Sequence[np.ndarray]
    edge_nodes: np.ndarray
    edge_cost: Sequence[np.ndarray]
    usage_node: np.ndarray = np.zeros(0, np.int64)
    usage: Sequence[np.ndarray] = ()
    usage_interval: np.ndarray = np.zeros((0, 2), np.int64)
    memory_limit: float | np.ndarray = np.inf
    load: Sequence[np.ndarray] = ()
    edge_load: Sequence[np.ndarray] = ()
    load_group: np.ndarray = np.zeros(0, np.int64)
    amount: Sequence[np.ndarray] = ()
    edge_amount: Sequence[np.ndarray] = ()
    amount_limit: np.ndarray = np.zeros(0)


def is_forbidden(cost: np.ndarray) -> np.ndarray:
    """Returns which entries must not be chosen."""
    return np.asarray(cost) >= FORBIDDEN


def with_infinities(cost: np.ndarray) -> np.ndarray:
    """Returns costs as floats, infinite where they must not be chosen."""
    return np.where(is_forbidden(cost), np.inf, np.asarray(cost, float))


def num_strategies(problem: Problem) -> np.ndarray:
    """Returns how many strategies each node has, `[V]`."""
    return np.fromiter((len(cost) for cost in problem.node_cost), np.int64, len(problem.node_cost))


def edge_ends(problem: Problem) -> np.ndarray:
    """Returns the two nodes of each edge, `[E, 2]` 64-bit integers."""
    return np.asarray(problem.edge_nodes, np.int64).reshape(-1, 2)


def num_loads(problem: Problem) -> int:
    """Returns R, 0 where nothing is a maximum."""
    return np.shape(problem.load[0])[1] if len(problem.load) else 0


def load_groups(problem: Problem) -> list[np.ndarray]:
    """Returns for each group the positions of its loads."""
    count = num_loads(problem)
    group = np.asarray(problem.load_group) if len(problem.load_group) else np.zeros(count, np.int64)
    return [np.flatnonzero(group == g) for g in np.unique(group)]


def num_memory_devices(problem: Problem) -> int:
    """Returns D of the memory: devices that have limits or usages of their own, 1 where all are alike."""
    return max([np.size(problem.memory_limit), *(np.size(usage[0]) for usage in problem.usage)])


class Evaluation(NamedTuple):
    """The exact cost of one choice.

    Attributes:
      cost: node, edge and largest load costs; a Python integer when all costs are integers, so sums are exact.
      peak: the largest live usage over time, a number or `[D]`.
      excess: by how much the peak or an amount is above its limit, 0 where all fit (the largest of all).
      feasible: memory and amounts fit and nothing forbidden is chosen.
    """

    cost: float
    peak: float | np.ndarray
    excess: float
    feasible: bool


CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute"]
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "collective_permute",
)


class Work(NamedTuple):
    """The work of one equation, as a whole on one device.

    Attributes:
      flops: arithmetic operations; a multiply-add counts as two.
      num_bytes: of operands and results, as if nothing were fused.
      dtype: name of the type that the arithmetic runs in.
    """

    flops: float
    num_bytes: float
    dtype: str


class AttentionWork(NamedTuple):
    """The work of one call of a fused attention kernel on one device.

    Attributes:
      flops, num_bytes, dtype: as those of `Work`.
      queries: of all heads and sequences.
      is_forward: False for the kernel that computes the gradients.
    """

    flops: float
    num_bytes: float
    dtype: str
    queries: float
    is_forward: bool


@dataclass(frozen=True)
class Link:
    """A mesh axis's link: a message of b bytes takes `latency_s + b * s_per_byte` seconds, or what its kind has.

    Attributes:
      latency_s: seconds of one collective however small.
      s_per_byte: inverse of the bandwidth at which one device sends around the ring of its axis.
      by_kind: for kinds of collectives that differ, the lines of which a message takes the fastest one. Examples: a
        ring crosses from host to host once, an all-to-all once for each pair of devices; XLA for CPU writes a
        reduce-scatter as an all-reduce, of twice the bytes; NCCL has one protocol for small messages and another for
        large ones.
      num_hosts: hosts that the devices of one group along the axis are in.

    Raises:
      ValueError: a number is NaN, negative or above `LARGEST_S`; a kind is unknown or has no line.
      TypeError: `by_kind` is no dict.
    """

    latency_s: float
    s_per_byte: float
    by_kind: Mapping[CollectiveKind, tuple[Line, ...]] = field(default_factory=dict)
    num_hosts: Count = 1

    def __post_init__(self):
        checked_number("Link.num_hosts", self.num_hosts, Count)
        _check_line("Link", Line(self.latency_s, self.s_per_byte))
        _check_mapping("Link.by_kind", self.by_kind, "kinds of collectives to tuples of Line")
        for kind, lines in self.by_kind.items():
            if kind not in COLLECTIVE_KINDS:
                raise ValueError(f"`Link.by_kind` must have keys of {COLLECTIVE_KINDS}, not {kind!r}.")
            if not isinstance(lines, tuple | list) or not lines or not all(isinstance(line, Line) for line in lines):
                raise ValueError(f"`Link.by_kind[{kind!r}]` must be a tuple of one Line or more, not {lines!r}.")
            for line in lines:
                _check_line(f"Link.by_kind[{kind!r}]", line)
        object.__setattr__(self, "by_kind", {kind: tuple(lines) for kind, lines in self.by_kind.items()})

    def __hash__(self) -> int:
        return hash((self.latency_s, self.s_per_byte, frozenset(self.by_kind.items()), self.num_hosts))

    def lines(self, kind: CollectiveKind) -> tuple[Line, ...]:
        """Returns the lines of a kind of collective, over the bytes that one device sends."""
        return self.by_kind.get(kind) or (Line(self.latency_s, self.s_per_byte),)


@dataclass(frozen=True)
class Hardware:
    """One device and the links between devices.

    Attributes:
      name: for people.
      flops_per_s: peak rate by dtype name ("float32", "bfloat16", ...), or one number for all.
      memory_bytes_per_s: bandwidth of the device's memory; `inf` if its traffic costs nothing.
      memory_bytes: size of the device's memory; `inf` if it cannot run out.
      links: the link of each mesh axis.
      combines_gathers: whether the compiler joins small all-gathers, all-to-alls and permutes, so that they share a
        latency. XLA does for GPU and TPU; for CPU it joins all-reduces only.
      exposed_share: of the seconds of collectives that have time (gathers of weights, reductions of their gradients),
        the part that a step waits for because they do not overlap with arithmetic; 1 where collectives hold arithmetic.
      matrix_share: the part of `flops_per_s` that large matrix products reach, above 0; 1 where the rate was measured.
      memory_share: the part of `memory_bytes_per_s` that kernels reach, likewise.
      kernel_launch_s: seconds from one kernel's end to the next one's start.
      host_memory_bytes_per_s: what one device copies to pinned memory of its host, or from there, in one direction
        while it sends nothing in the other one; None where that is not known, and arrays are not offloaded then.
      measured: laws of measured kernels, by which fused attention and products are priced where it has any.

    Raises:
      ValueError: a number is beyond its bounds, or `flops_per_s` names no dtype.
      TypeError: a link is not a `Link`, or `links` is no dict.
    """

    name: str
    flops_per_s: Mapping[str, float] | float
    memory_bytes_per_s: float
    memory_bytes: float
    links: Mapping[str, Link]
    combines_gathers: bool = True
    exposed_share: float = 1.0
    matrix_share: float = 1.0
    memory_share: float = 1.0
    kernel_launch_s: float = 0.0
    host_memory_bytes_per_s: float | None = None
    measured: MeasuredRates = NOT_MEASURED

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise TypeError(f"`Hardware.name` must be text, such as 'my devices', not {self.name!r}.")
        for name in ("memory_bytes_per_s", "memory_bytes"):
            checked_number(f"Hardware.{name}", getattr(self, name), _RATE)
        checked_number("Hardware.exposed_share", self.exposed_share, Share)
        if isinstance(self.flops_per_s, Mapping):
            if not self.flops_per_s:
                raise ValueError("`Hardware.flops_per_s` has no dtype; give at least one, such as {'float32': 1e12}.")
            for dtype, rate in self.flops_per_s.items():
                kind_and_bits(dtype)
                checked_number(f"Hardware.flops_per_s[{dtype!r}]", rate, _RATE)
            object.__setattr__(self, "flops_per_s", dict(self.flops_per_s))
        else:
            checked_number("Hardware.flops_per_s", self.flops_per_s, _RATE)
        for name in ("matrix_share", "memory_share"):
            checked_number(f"Hardware.{name}", getattr(self, name), _REACHED_SHARE)
        checked_number("Hardware.kernel_launch_s", self.kernel_launch_s, _SECONDS)
        if self.host_memory_bytes_per_s is not None:
            checked_number("Hardware.host_memory_bytes_per_s", self.host_memory_bytes_per_s, _RATE)
        _check_mapping("Hardware.links", self.links, "axes of the mesh to Link(latency_s, s_per_byte)")
        for axis, link in self.links.items():
            if not isinstance(link, Link):
                raise TypeError(f"`Hardware.links[{axis!r}]` must be a Link(latency_s, s_per_byte), not {link!r}.")
        object.__setattr__(self, "links", dict(self.links))

    def __hash__(self) -> int:
        rates = self.flops_per_s
        rates = tuple(sorted(rates.items())) if isinstance(rates, Mapping) else rates
        links = tuple(sorted(self.links.items(), key=lambda item: item[0]))
        return hash(
            (self.name, rates, self.memory_bytes_per_s, self.memory_bytes, links)
        )  # equal ones have equal hashes

    def link(self, axis: str) -> Link:
        """Returns the link of a mesh axis.

        Raises:
          ValueError: the hardware has no link for the axis.
        """
        if axis not in self.links:
            raise ValueError(
                f"`hardware` {self.name!r} has no link for the mesh axis {axis!r}; it has {tuple(self.links)}. "
                f"Add `links={{{axis!r}: Link(latency_s, s_per_byte)}}`."
            )
        return self.links[axis]

    def reached_flops_per_s(self, dtype: str) -> float:
        """Returns the rate that large matrix products in a dtype reach; raises as `peak_flops_per_s`."""
        return self.matrix_share * self.peak_flops_per_s(dtype)

    @property
    def reached_memory_bytes_per_s(self) -> float:
        """The memory's bandwidth that kernels reach."""
        return self.memory_share * self.memory_bytes_per_s

    def peak_flops_per_s(self, dtype: str) -> float:
        """Returns the peak rate for a dtype by name.

        A dtype that is not listed takes the rate of the narrowest listed one that is at least as wide, of its own kind
        (float or integer) if there is one: float8 runs at least as fast as bfloat16. One that is wider than all takes
        the widest one's rate divided by the ratio of widths. Complex counts as its real part's type.
        """
        if not isinstance(self.flops_per_s, Mapping):
            return float(self.flops_per_s)
        if dtype in self.flops_per_s:
            return float(self.flops_per_s[dtype])
        kind, bits = kind_and_bits(dtype)
        rates = [(*kind_and_bits(name), rate) for name, rate in self.flops_per_s.items()]
        for candidates in ([entry for entry in rates if entry[0] == kind], rates):
            wide_enough = [(width, rate) for _, width, rate in candidates if width >= bits]
            if wide_enough:
                return float(min(wide_enough)[1])
        _, width, rate = max(rates, key=lambda entry: entry[1])
        return float(rate) * width / bits


def _check_mapping(name: str, value: Any, of: str) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"`{name}` must be a dict from {of}, not {value!r}.")


def _check_line(name: str, line: Line) -> None:
    for field_name, seconds in line._asdict().items():
        checked_number(f"{name}.{field_name}", seconds, _SECONDS)


class CostModel(Protocol):
    """A function from the size of an operation and the hardware to the seconds that it takes.

    A file with a cost model has an `EXAMPLE`, a function without arguments that returns a few of its models as a tuple.
    The conformance tests find it there, give the models hardware with a link for the axis "data", and hold them to
    these rules: seconds are finite and never negative; nothing takes no time; more never takes less time; no hardware
    that is better in one respect takes longer; sizes of any shape give float64 seconds of the same shape.
    """

    def __call__(self, size: ArrayLike, hardware: Hardware) -> np.ndarray:
        """Computes seconds, of the shape of `size`, which is in the model's own unit, such as bytes."""
        ...


_KIND_AND_BITS = {
    **{f"float{bits}": ("float", bits) for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": ("int", bits) for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)},
    "bfloat16": ("float", 16),
    "complex64": ("float", 32),
    "complex128": ("float", 64),
    "bool": ("int", 8),
}


def kind_and_bits(dtype: str) -> tuple[str, int]:
    """Returns "float" or "int", and the width of one number in bits; of a complex number that of its real part."""
    if dtype.startswith(("float8", "float4")):
        return "float", int(dtype[5])
    if dtype in _KIND_AND_BITS:
        return _KIND_AND_BITS[dtype]
    # Random keys and whatever dtype comes next: 32 bits of integer arithmetic is what they are made of.
    if dtype.startswith("key<") or dtype == "float0":
        return "int", 32
    raise ValueError(f"`dtype` {dtype!r} is not a dtype's name such as 'float32', 'bfloat16' or 'int8'.")
