"""A plan of a pipeline as users have it: data that can be shown, saved and loaded."""

from dataclasses import dataclass
from os import PathLike
from typing import NoReturn

from diffshard.pipelines.plans.base import PipelinePlanData
from diffshard.pipelines.plans.file import load, save
from diffshard.pipelines.plans.page import format_pipeline_page
from diffshard.pipelines.plans.text import format_pipeline_in_line, format_pipeline_plan
from diffshard.plans.notebook import framed


@dataclass(frozen=True)
class PipelinePlan(PipelinePlanData):
    """How a training step runs as a pipeline. Made by `diffshard.search(fn, cluster, pipeline=...).plan(*args)`.

    `print` shows it. Its fields are those of `PipelinePlanData`.
    """

    def __str__(self) -> str:
        return format_pipeline_plan(self)

    def __repr__(self) -> str:
        return format_pipeline_in_line(self)

    def html(self) -> str:
        """Returns the plan as a self-contained page for a browser; in a notebook a plan shows itself as this page."""
        return format_pipeline_page(self)

    def _repr_html_(self) -> str:
        return framed(self.html())

    def apply(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises `TypeError`: the plan of a pipeline can be shown, and is not enough to run a step.

        Raises:
          TypeError: always; says what to do.
        """
        raise TypeError(
            "The plan of a pipeline is shown, not applied: it does not have the shardings inside of its stages. "
            "`diffshard.search(fn, cluster, pipeline=...)` searches them again, and runs the step."
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as JSON; the file is replaced whole or not at all.

        Raises:
          OSError: the file cannot be written.
        """
        save(self, path)

    @staticmethod
    def load(path: str | PathLike[str]) -> "PipelinePlan":
        """Reads a plan back, to be shown.

        Raises:
          PlanError: the file is not a plan of a pipeline, damaged, or newer than this version.
          OSError: the file cannot be read.
        """
        return load(path, PipelinePlan)
