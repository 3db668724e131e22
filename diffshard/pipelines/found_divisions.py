"""What a search for stages solves, and what it finds."""

from dataclasses import dataclass
from typing import NamedTuple

from diffshard.pipelines.stage_programme import Stage
from diffshard.pipelines.stage_search import StageLayout


class Entry(NamedTuple):
    """A stage that may be solved.

    Attributes:
      start, end: its layers.
      submesh: the index of its submesh.
      in_flight: how many micro-batches it keeps.
    """

    start: int
    end: int
    submesh: int
    in_flight: int


@dataclass
class FoundDivision:
    """A division of the layers into stages, with the shardings found for each.

    Attributes:
      stages: from the first to the last.
      entries: those of the stages.
      layouts: of the stages.
      bound_s: the schedule's lower bound for the stages' seconds.
    """

    stages: tuple[Stage, ...]
    entries: tuple[Entry, ...]
    layouts: tuple[StageLayout, ...]
    bound_s: float
