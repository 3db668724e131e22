"""What a strategy costs by itself: arithmetic and memory traffic, the collectives that finish it, a preference."""

import copy
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from cost.base import AttentionWork, Hardware, Work
from cost.compute import equation_dtype, equation_flops, product_s, roofline_s, work_s
from cost.edges import map_by_key
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Coded, FormatKey, Layout, Node, ShardingStrategy, coded_by
from search_spaces.sharding.coded_sums import finished_steps
from search_spaces.sharding.codes import CODES, precision_of
from search_spaces.sharding.custom_calls.operations import custom_call_of, local_operands, local_work, own_collectives
from search_spaces.sharding.fusion import PICKS
from search_spaces.sharding.graph import Operand, Value, Vertex, copies_over_host_link, trips_of
from search_spaces.sharding.kernels import Kernels
from search_spaces.sharding.own_collectives import (
    MappedCollectives,
    OwnCollective,
    PricedCollective,
    priced,
    stated_seconds,
)
from search_spaces.sharding.product_formats import (
    FORMATS,
    ProductFormat,
    contracted,
    has_whole_blocks,
)
from search_spaces.sharding.reshard_costs import CollectiveShares, ReshardCosts, shared_message
from search_spaces.sharding.spec import local_bytes, shards
from search_spaces.sharding.sum_residuals import BYTES, residual_of

UPDATES = {
    "dynamic_update_slice": 1,
    "scatter": 2,
    "scatter-add": 2,
    "scatter-mul": 2,
    "scatter-min": 2,
    "scatter-max": 2,
}
"""Operations that write into the first operand's memory, with the number of the operand that is written there."""
PREFERENCE_SHARE = 1e-3
"""The preference for small arguments, as a share of the time to read them; it decides only between equal times."""
PREFERENCE_WITHOUT_MEMORY_RATE = 1e-6
"""The same where memory traffic is free, as a share of the slowest link's seconds for each byte."""


class NodeCosts:
    """Seconds of the nodes of a space on one mesh.

    Args:
      axis_sizes: `[A]` devices along each mesh axis.
      shares: which parts of a collective's latency and time count for a value.
      kernels: what is read from memory and written to it.
      forms: a number for each vertex, equal for those that compute the same.
      host_s_per_byte: what a step waits for the copies of an array of the state that is on the host, by its input.
    """

    def __init__(
        self,
        axis_sizes: tuple[int, ...],
        hardware: Hardware,
        reshard_costs: ReshardCosts,
        shares: CollectiveShares,
        kernels: Kernels,
        forms: Sequence[int],
        host_s_per_byte: Mapping[int, float] | None = None,
    ):
        self.axis_sizes, self.hardware, self.kernels, self._forms = axis_sizes, hardware, kernels, forms
        self._host_s_per_byte = {} if host_s_per_byte is None else host_s_per_byte
        self._set_prices({})
        self.reshard_costs, self.shares = reshard_costs, shares
        permute_s = partial(reshard_costs.collective_s, "collective_permute")
        self._mapped = MappedCollectives(reshard_costs.axis_names, axis_sizes, permute_s)
        self._chosen_compute_s: dict[tuple[int, ShardingStrategy], float] = {}
        self._compute_s_of_form: dict[Hashable, float] = {}
        self._terms_of_key: dict[Hashable, tuple[list[np.ndarray], Any]] = {}

    def with_prices(self, format_price_s: Mapping[FormatKey, float]) -> "NodeCosts":
        """Returns the costs with what it costs to have something in a format, seconds; all else is priced once."""
        priced = copy.copy(self)
        priced._set_prices(format_price_s)
        return priced

    def _set_prices(self, format_price_s: Mapping[FormatKey, float]) -> None:
        self._price_s: dict[tuple[int, str, str], float] = {}
        self._priced: dict[int, list[tuple[str, str, float]]] = {}
        for key, price_s in format_price_s.items():
            vertex, name = key[0], key[1]
            kind = key.kind if isinstance(key, Coded) else "product"
            self._price_s[vertex, kind, name] = price_s
            self._priced.setdefault(vertex, []).append((kind, name, price_s))

    def all_s(self, nodes: Sequence[Node]) -> list[np.ndarray]:
        """Returns the node costs, computed once for all nodes that agree in what they depend on."""
        return map_by_key(self.node_s, nodes, lambda n: (self.key(n), tuple(self._priced.get(n.vertex.index, ()))))

    def key(self, node: Node) -> Hashable:
        """Returns a key of all that a node's seconds depend on besides its prices."""
        vertex = node.vertex
        shares = tuple((self.shares.latency(value), self.shares.exposed(value)) for value in vertex.results)
        return (
            self._forms[vertex.index],
            node.shared_value is None,
            id(node.strategies),
            shares,
            self.kernels.at(vertex),
            self._host_s_per_byte.get(vertex.index),
        )

    def node_s(self, node: Node) -> np.ndarray:
        """Returns the node cost `[S_v]`: the sum of the terms below; a shared reshard costs what encoding does."""
        key = self.key(node)
        if key not in self._terms_of_key:
            self._terms_of_key[key] = self._terms_s(node), node.strategies  # kept, since the key has their id
        first, *others = self._terms_of_key[key][0]
        if node.vertex.index in self._priced:  # a shared reshard's format is that of the products, which pay for it
            own = node.strategies if node.shared_value is None else [s._replace(format="") for s in node.strategies]
            others = [np.array([self._format_price_s(node.vertex, s) for s in own]), *others]
        return sum(others, first)

    def _terms_s(self, node: Node) -> list[np.ndarray]:
        """Returns the terms of a node's cost without prices, `[S_v]` each."""
        vertex, strategies = node.vertex, node.strategies
        if node.shared_value is not None:
            maxima_s = np.array([sum(seconds for _, seconds in self.shared_maxima_s(node, s)) for s in strategies])
            return [self.shared_reshard_s(node) + maxima_s]
        terms = [self.compute_s(vertex, strategies) + self.preference_s(vertex, strategies)]
        if vertex.kind == "stack":
            of_value = vertex, vertex.results[0]
            terms.append(np.array([self.keeping_s(*of_value, s.results[0], s.kept_in) for s in strategies]))
        collectives_s = [self.reduction_s(vertex, s) + self._own_collectives_s(vertex, s) for s in strategies]
        return [*terms, np.array(collectives_s)]

    def _format_price_s(self, vertex: Vertex, strategy: ShardingStrategy) -> float:
        index, product_s = vertex.index, 0.0
        if strategy.format:
            product_s = self._price_s[index, "product", strategy.format]
        return product_s + sum(self._price_s[index, key.kind, key.format] for key in coded_by(strategy, index))

    def compute_s(self, vertex: Vertex, strategies: Sequence[ShardingStrategy]) -> np.ndarray:
        """Returns the seconds of one device's arithmetic and memory traffic in one step, `[strategies]`."""
        if vertex.index in self._host_s_per_byte and vertex.kind == "input":
            return np.array([self._host_copies_s(vertex, s) for s in strategies])
        if vertex.equation is None or vertex.kind not in ("operation", "stack"):
            return np.zeros(len(strategies))
        copied_bytes = np.array([self._copied_bytes(vertex, s) for s in strategies])
        copy_s = roofline_s(0.0, copied_bytes, equation_dtype(vertex.equation), self.hardware)
        if vertex.kind == "stack":
            return vertex.weight * copy_s
        if custom_call_of(vertex) is not None:
            return vertex.weight * np.array([self._custom_call_s(vertex, s) for s in strategies])
        if copies_over_host_link(vertex) and self.hardware.host_memory_bytes_per_s is not None:
            local = [local_bytes(vertex.results[0], s.results[0], self.axis_sizes) for s in strategies]
            exposed_s = self.hardware.exposed_share / self.hardware.host_memory_bytes_per_s
            return vertex.weight * exposed_s * np.array(local)
        stated_s = stated_seconds(vertex.equation)
        if stated_s is not None:
            return np.full(len(strategies), vertex.weight * stated_s)
        seconds = self._exact_compute_s(vertex, strategies, copy_s)
        for name in dict.fromkeys(s.format for s in strategies if s.format):
            formatted_s = self._formatted_compute_s(vertex, strategies, copy_s, FORMATS[name])
            seconds = np.where([s.format == name for s in strategies], formatted_s, seconds)
        return seconds + np.array([self._coding_s(vertex, s) for s in strategies])

    def _host_copies_s(self, vertex: Vertex, strategy: ShardingStrategy) -> float:
        num_bytes = local_bytes(vertex.results[0], strategy.unreduced[0], self.axis_sizes)
        return self._host_s_per_byte[vertex.index] * num_bytes if strategy.on_host else 0.0

    def _exact_compute_s(
        self, vertex: Vertex, strategies: Sequence[ShardingStrategy], copy_s: np.ndarray
    ) -> np.ndarray:
        """Returns the seconds of an operation's arithmetic and traffic in one step as it is, `[strategies]`."""
        assert vertex.equation is not None
        num_bytes, flops, launch_s = self._work(vertex, strategies)
        dtype = equation_dtype(vertex.equation)
        kernel_s = self._measured_s(vertex, strategies, roofline_s(flops, num_bytes, dtype, self.hardware))
        return vertex.weight * (launch_s + copy_s + kernel_s)

    def _formatted_compute_s(
        self, vertex: Vertex, strategies: Sequence[ShardingStrategy], copy_s: np.ndarray, to: ProductFormat
    ) -> np.ndarray:
        """Returns the seconds of a product in a format in one step, `[strategies]`.

        What rounds its operands is on their way to it. Where blocks would be cut, a strategy takes forever.
        """
        assert vertex.equation is not None
        num_bytes, flops, launch_s = self._work(vertex, strategies)
        read = np.zeros(len(strategies))
        for position, operand in enumerate(vertex.operands):
            assert isinstance(operand, Value)
            own = [local_bytes(operand, s.operands[position], self.axis_sizes) for s in strategies]
            share = to.num_bytes / operand.dtype.itemsize
            read += (1 - share) * self.kernels.reads[vertex.index][position] * np.array(own)
        kernel_s = roofline_s(flops, num_bytes - read, to.rate, self.hardware)
        seconds = vertex.weight * (launch_s + copy_s + kernel_s)
        if to.scaled == "block":
            parts = [shards((s.operands[0][contracted(vertex, 0)[-1]],), self.axis_sizes) for s in strategies]
            seconds = np.where([has_whole_blocks(vertex, n) for n in parts], seconds, np.inf)
        return seconds

    def _work(self, vertex: Vertex, strategies: Sequence[ShardingStrategy]) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns bytes and FLOPs of an operation on one device, `[strategies]` each, and seconds of launches."""
        assert vertex.equation is not None
        num_bytes = np.array([touched_bytes(vertex, s, self.kernels, self.axis_sizes) for s in strategies])
        flops = equation_flops(vertex.equation) / np.array([s.parts for s in strategies], float)
        return num_bytes, flops, self.kernels.launches[vertex.index] * self.hardware.kernel_launch_s

    def _measured_s(self, vertex: Vertex, strategies: Sequence[ShardingStrategy], roofline: np.ndarray) -> np.ndarray:
        """Returns the seconds of products as measured where the hardware has that, at least their traffic; or others'.

        What a product reads in another type or through a view is its own traffic, which the law does not know.
        """
        assert vertex.equation is not None
        if vertex.primitive != "dot_general" or not self.hardware.measured.products:
            return roofline
        shapes = [[x.shape for x in local_operands(vertex, s, self.axis_sizes)] for s in strategies]
        seconds = [product_s(vertex.equation, own, self.hardware) for own in shapes]
        return np.array([r if s is None else s for r, s in zip(roofline, seconds, strict=True)])

    def _custom_call_s(self, vertex: Vertex, strategy: ShardingStrategy) -> float:
        """Returns the seconds of one run of a custom call, which is a kernel of its own."""
        return work_s(local_work(vertex, strategy, self.axis_sizes), self.hardware)

    def chosen_compute_s(self, vertex: Vertex, strategy: ShardingStrategy) -> float:
        """Returns `compute_s` of one strategy; a plan's strategies are asked for several times."""
        key = vertex.index, strategy
        if key not in self._chosen_compute_s:
            host_s_per_byte = self._host_s_per_byte.get(vertex.index)
            of_form = self._forms[vertex.index], self.kernels.at(vertex), strategy, host_s_per_byte
            if of_form not in self._compute_s_of_form:
                self._compute_s_of_form[of_form] = float(self.compute_s(vertex, (strategy,))[0])
            self._chosen_compute_s[key] = self._compute_s_of_form[of_form]
        return self._chosen_compute_s[key]

    def work(self, vertex: Vertex, strategy: ShardingStrategy) -> Work | AttentionWork:
        """Returns the work of one device in one run of an operation, also where the operation states its seconds."""
        assert vertex.equation is not None
        if custom_call_of(vertex) is not None:
            return local_work(vertex, strategy, self.axis_sizes)
        dtype = FORMATS[strategy.format].rate if strategy.format else equation_dtype(vertex.equation)
        num_bytes = self._copied_bytes(vertex, strategy)
        if vertex.kind == "stack":
            return Work(0.0, num_bytes, dtype)
        num_bytes += touched_bytes(vertex, strategy, self.kernels, self.axis_sizes)
        return Work(equation_flops(vertex.equation) / strategy.parts, num_bytes, dtype)

    def _copied_bytes(self, vertex: Vertex, strategy: ShardingStrategy) -> float:
        copies = zip(self.kernels.copies[vertex.index], vertex.operands, strategy.operands, strict=True)
        return sum(times * local_bytes(o, spec, self.axis_sizes) for times, o, spec in copies if isinstance(o, Value))

    def execution_s(self, vertices: Sequence[Vertex], strategies: Sequence[ShardingStrategy]) -> np.ndarray:
        """Returns the seconds of arithmetic and memory traffic of one execution of each vertex, `[vertices]`."""
        pairs = zip(vertices, strategies, strict=True)
        return np.array([self.chosen_compute_s(v, s) / (v.weight or 1.0) for v, s in pairs])

    def finish_s(self, vertex: Vertex, strategy: ShardingStrategy) -> float:
        """Returns the seconds in which partial results are finished: for collectives, and for encoding sums."""
        return self.reduction_s(vertex, strategy) + self._coding_s(vertex, strategy)

    def reduction_s(self, vertex: Vertex, strategy: ShardingStrategy) -> float:
        """Returns how long a step waits for the collectives that finish a strategy's partial results or gather."""
        seconds = 0.0
        for i, value in enumerate(vertex.results):
            latency_share, exposed = self.shares.latency(value), self.exposed(value, strategy)
            for step in finished_steps(self.reshard_costs.path, value, strategy, i)[0]:
                seconds += exposed * self.reshard_costs.step_s(step, value.num_bytes, latency_share)
        return seconds * vertex.reduction_weight

    def exposed(self, value: Value, strategy: ShardingStrategy) -> float:
        """Returns the part of a reduction's seconds that a step waits for.

        Sums that are sent as codes are waited for: encoding them stands between two collectives, so that neither of
        these has arithmetic to run beside in compiled programs.
        """
        return 1.0 if strategy.sent_in else self.shares.exposed(value)

    def _coding_s(self, vertex: Vertex, strategy: ShardingStrategy) -> float:
        """Returns the seconds of encoding and decoding sums: numbers are read and codes written, or the reverse.

        With error feedback the kernel that encodes reads a residual as well, and writes the next one.
        """
        if not strategy.sent_in:
            return 0.0
        (value,), path = vertex.results, self.reshard_costs.path
        num_coded = finished_steps(path, value, strategy)[1]
        num_bytes = num_coded * (value.dtype.itemsize + precision_of(strategy.sent_in).bits / 8)
        residual = residual_of(path, vertex, strategy)
        if residual is not None:
            num_bytes += 2 * BYTES * residual.local_elements(self.axis_sizes) / prod(trips_of(vertex))
        kernel_s = float(roofline_s(0.0, np.array(num_bytes), str(value.dtype), self.hardware))
        return vertex.weight * (kernel_s + 2 * self.hardware.kernel_launch_s)

    def shared_reshard_s(self, node: Node) -> np.ndarray:
        """Returns the seconds `[S_v]` in which a shared value is kept as codes and decoded, or rounded for products."""
        assert node.shared_value is not None
        return np.array(
            [
                self.keeping_s(node.vertex, node.shared_value, s.results[0], s.kept_in)
                + self.shared_rounding_s(node, s)
                for s in node.strategies
            ]
        )

    def shared_rounding_s(self, node: Node, strategy: ShardingStrategy) -> float:
        """Returns the seconds in which a shared reshard rounds its value for several products, if it does."""
        if node.shared_value is None or not strategy.format:
            return 0.0
        message = shared_message(strategy.results[0], strategy.format)
        return node.vertex.weight * self.reshard_costs.rounding_s(node.shared_value, message, strategy.format)

    def shared_maxima_s(self, node: Node, strategy: ShardingStrategy) -> list[tuple[int, float]]:
        """Returns the mesh axes over which a shared reshard finds the magnitude to round by, with their seconds."""
        if node.shared_value is None or not strategy.format:
            return []
        axes = shared_message(strategy.results[0], strategy.format).maxima
        return [(axis, node.vertex.weight * self.reshard_costs.maximum_s(axis)) for axis in axes]

    def chosen_keeping_s(self, vertex: Vertex, layout: Layout) -> float:
        """Returns the seconds in which a layout's codes of a result are made for the backward pass, and decoded."""
        kept_in = layout.strategies[vertex.index].kept_in
        if not kept_in:
            return 0.0
        (value,) = vertex.results
        return self.keeping_s(vertex, value, layout.value_specs[value.id], kept_in)

    def keeping_s(self, vertex: Vertex, value: Value, spec: IndexedSpec, kept_in: str) -> float:
        """Returns the seconds in which a vertex's value with a spec is encoded to be kept, and decoded.

        They are 0 for no format. Each trip of a loop has its part of a stack.
        """
        if not kept_in:
            return 0.0
        num_bytes = local_bytes(value, spec, self.axis_sizes) * (1 + CODES[kept_in].bits / 8 / value.dtype.itemsize)
        num_bytes /= value.shape[0] if vertex.kind == "stack" else 1
        kernel_s = float(roofline_s(0.0, np.array(2 * num_bytes), str(value.dtype), self.hardware))
        return vertex.weight * (kernel_s + 2 * self.hardware.kernel_launch_s)

    def own_collectives(self, vertex: Vertex, strategy: ShardingStrategy) -> list[PricedCollective]:
        """Returns the collectives that a custom call or a `shard_map` runs itself, with their seconds in one run.

        Of a `shard_map` that states its seconds there are none, as these seconds have them.
        """
        if vertex.equation is not None and vertex.primitive == "shard_map":
            is_stated = stated_seconds(vertex.equation) is not None
            return [] if is_stated else priced(self._mapped.of(vertex.equation), 0.0, self._alone_s)
        collectives = own_collectives(vertex, strategy, self.reshard_costs.axis_names, self.axis_sizes)
        return priced(collectives, self._custom_call_s(vertex, strategy), self._alone_s) if collectives else []

    def _alone_s(self, collective: OwnCollective) -> float:
        return self.reshard_costs.collective_s(collective.kind, collective.axis, collective.num_bytes)

    def _own_collectives_s(self, vertex: Vertex, strategy: ShardingStrategy) -> float:
        return vertex.weight * sum(c.exposed_s for c in self.own_collectives(vertex, strategy))

    def preference_s(self, vertex: Vertex, strategies: Sequence[ShardingStrategy]) -> np.ndarray:
        """Returns a thousandth of the time to read what an argument stores, `[strategies]`; it decides between equals.

        Storing gradients and optimiser state sharded (ZeRO) moves as many bytes as plain data parallelism does. Of
        equally small plans the one that splits the first dimensions wins: layers that are alike are then split alike.
        """
        if vertex.kind != "input":
            return np.zeros(len(strategies))
        rate = self.hardware.memory_bytes_per_s
        s_per_byte = (
            PREFERENCE_SHARE / rate
            if np.isfinite(rate)
            else PREFERENCE_WITHOUT_MEMORY_RATE * self.reshard_costs.largest_s_per_byte
        )
        s_per_byte /= prod(self.axis_sizes)  # so that the bound gives up no more than a part of a sharded step
        stored_specs = [s.unreduced[0] for s in strategies]
        late = [1 + 0.1 * max((d for d, axes in enumerate(spec) if axes), default=0) for spec in stored_specs]
        return s_per_byte * np.array(
            [local_bytes(vertex.results[0], s, self.axis_sizes) * w for s, w in zip(stored_specs, late, strict=True)]
        )


def touched_bytes(vertex: Vertex, strategy: ShardingStrategy, kernels: Kernels, axis_sizes: tuple[int, ...]) -> float:
    """Returns the bytes that an operation reads and writes on one device: nothing fused, of a table the picked rows."""

    def local(array: Operand, spec: IndexedSpec) -> float:
        return local_bytes(array, spec, axis_sizes) if isinstance(array, Value) else 0.0

    operands = [local(o, spec) for o, spec in zip(vertex.operands, strategy.operands, strict=True)]
    results = [local(v, spec) for v, spec in zip(vertex.results, strategy.unreduced, strict=True)]
    reads = [n * num_bytes for n, num_bytes in zip(kernels.reads[vertex.index], operands, strict=True)]
    writes = [kernels.writes[v.id] * num_bytes for v, num_bytes in zip(vertex.results, results, strict=True)]
    if vertex.primitive in PICKS:
        reads[0] = min(reads[0], results[0])
    elif vertex.primitive in UPDATES and writes[0]:
        update = operands[UPDATES[vertex.primitive]]
        # A scatter adds to what is there, which it reads.
        reads[0], writes[0] = (update if vertex.primitive.startswith("scatter-") else 0.0), update
    return sum(reads) + sum(writes)
