"""Replicas of a pipeline that take different numbers of micro-batches: their schedule, and how to balance them.

Letters for sizes: R replicas, S stages of each of them, M micro-batches of all together.
"""

from collections.abc import Sequence

import numpy as np

from cost.pipeline_schedules import ScheduleGraph


def joined_graph(graphs: Sequence[ScheduleGraph]) -> ScheduleGraph:
    """Returns the operations of pipelines that run side by side, as those of one pipeline.

    Stage s of the r-th one is stage r·S + s; its micro-batches are numbered after those of the ones before. Operations
    are in an order in which all pipelines proceed evenly.

    Args:
      graphs: of pipelines with S stages each.
    """
    sizes = [len(graph.kind) for graph in graphs]
    pipeline = np.repeat(np.arange(len(graphs)), sizes)
    own = np.concatenate([np.arange(size) for size in sizes])
    order = np.lexsort((pipeline, (own + 1) / np.asarray(sizes)[pipeline]))
    first = np.concatenate([[0], np.cumsum(sizes)])
    place = np.empty(first[-1] + 1, int)  # of each operation in the order
    place[order], place[-1] = np.arange(first[-1]), first[-1]
    first_stage = np.cumsum([0, *(graph.num_stages for graph in graphs)])
    first_microbatch = np.cumsum([0, *(graph.num_microbatches for graph in graphs)])
    predecessors = np.concatenate(
        [
            place[np.where(graph.predecessors == size, first[-1], graph.predecessors + start)]
            for graph, size, start in zip(graphs, sizes, first, strict=False)
        ]
    )
    kind, stage, microbatch = (
        np.concatenate([getattr(graph, name) for graph in graphs]) for name in ("kind", "stage", "microbatch")
    )
    return ScheduleGraph(
        int(first_stage[-1]),
        int(first_microbatch[-1]),
        kind[order],
        (stage + first_stage[pipeline])[order],
        (microbatch + first_microbatch[pipeline])[order],
        predecessors[order],
    )


def balanced_microbatches(seconds: Sequence[Sequence[float]] | np.ndarray, num_microbatches: int) -> list[int]:
    """Returns how many micro-batches each replica takes so that the slowest one is as fast as possible.

    >>> balanced_microbatches([[0, 1, 2, 3, 4], [0, 3, 6, 9, 12]], 4)
    [3, 1]

    Args:
      seconds: `[R, M + 1]`: what a replica takes for 0 to M micro-batches, not less for more of them; infinite for
        numbers that it cannot take.
      num_microbatches: M.

    Raises:
      ValueError: no numbers are possible.
    """
    table = np.asarray(seconds, float)
    numbers = np.arange(table.shape[1])
    least = [int(np.argmax(np.isfinite(row))) for row in table]
    for limit in np.unique(table[np.isfinite(table)]):
        most = [int(numbers[row <= limit].max(initial=-1)) for row in table]
        enough = all(n >= first for n, first in zip(most, least, strict=True))
        if enough and sum(most) >= num_microbatches >= sum(least):
            for r in reversed(range(len(most))):
                most[r] -= min(sum(most) - num_microbatches, most[r] - least[r])
            return most
    raise ValueError(f"`seconds` of {len(table)} replicas leave no numbers for {num_microbatches} micro-batches.")
