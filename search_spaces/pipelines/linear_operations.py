"""Which operations take parts of sums to parts of sums."""

from collections.abc import Sequence

from search_spaces.pipelines.batch_states import State
from search_spaces.sharding.graph import Vertex

# Operations that are linear in what the numbers name; with whole others they take parts of sums to parts of sums.
_LINEAR_IN_ALL = frozenset(
    {
        "add",
        "add_any",
        "sub",
        "concatenate",
        "stack",
        "neg",
        "convert_element_type",
        "copy",
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "reduce_sum",
        "rev",
        "slice",
        "reduce_precision",
        "optimization_barrier",
        "split",
        "unstack",
        "copy_p",
    }
)
_LINEAR_IN_ONE = frozenset({"mul", "dot_general"})
_LINEAR_IN_FIRST = frozenset({"div", "dynamic_slice", "gather", "cumsum"})
_LINEAR_IN_CASES = frozenset({"select_n"})
_LINEAR_IN_FIRST_TWO = frozenset({"dynamic_update_slice", "pad"})


def is_linear(vertex: Vertex, states: Sequence[State]) -> bool:
    """Tells whether an operation is linear in the operands that are parts of sums."""
    name, partial = vertex.primitive, [i for i, state in enumerate(states) if state != "whole"]
    if name in _LINEAR_IN_ALL:
        return True
    if name in _LINEAR_IN_ONE:
        return len(partial) == 1
    if name in _LINEAR_IN_FIRST:
        return partial == [0]
    if name in _LINEAR_IN_CASES:
        return 0 not in partial
    return name in _LINEAR_IN_FIRST_TWO and set(partial) <= {0, 1}


def counted_operands(vertex: Vertex, states: Sequence[State]) -> set[int]:
    """Returns the operands of a linear operation that are added to parts of sums, so that one micro-batch counts them.

    A factor counts in all micro-batches, and so do conditions and positions.
    """
    if vertex.primitive in _LINEAR_IN_ONE | _LINEAR_IN_FIRST:
        return set()
    counted = {i for i, state in enumerate(states) if state == "whole"}
    if vertex.primitive in _LINEAR_IN_CASES:
        return counted - {0}
    return counted & {0, 1} if vertex.primitive in _LINEAR_IN_FIRST_TWO else counted
