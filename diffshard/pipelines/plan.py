"""A plan of a pipeline as users have it: data that can be shown, saved, loaded, and applied to a step."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from cost.base import Hardware
from cost.clusters import Cluster
from cost.presets import PRESET_NAMES, device_and_network, preset_name_of
from diffshard.base import PlanError
from diffshard.live_progress import LiveLine
from diffshard.pipelines.base import Pipeline
from diffshard.pipelines.cutting import UncutStep, uncut_step
from diffshard.pipelines.decisions import trace_facts
from diffshard.pipelines.options import PipelineOptions, SearchProgress, donated_arrays, pipeline_options
from diffshard.pipelines.pipelined_function import PipelinedFunction
from diffshard.pipelines.planned_pipeline import FoundPipeline
from diffshard.pipelines.plans.base import PipelinePlanData
from diffshard.pipelines.plans.consistency import FILE, to_json
from diffshard.pipelines.plans.page import format_pipeline_page
from diffshard.pipelines.plans.text import format_pipeline_in_line, format_pipeline_plan
from diffshard.pipelines.replicated_pipeline import applied_pipeline, check_cluster
from diffshard.pipelines.step_search import StepSearch
from diffshard.plans.file import from_json as plan_from_json
from diffshard.plans.plan_record import PlanRecord
from diffshard.processes import Processes
from diffshard.sharding_search.fingerprints import digest_of
from diffshard.sharding_search.plan import Plan


@dataclass(frozen=True)
class PipelinePlan(PipelinePlanData, PlanRecord):
    """How a training step runs as a pipeline. Made by `diffshard.search(fn, cluster, pipeline=...).plan(*args)`.

    `print` shows it. Its fields are those of `PipelinePlanData`. The plans of the stages' programs are not compared by
    `diff`; those of `programs()` have a `diff` each.
    """

    _file = FILE
    _not_compared = ("search_s", "tried", "facts", "question", "decisions")

    def __str__(self) -> str:
        return format_pipeline_plan(self)

    def __repr__(self) -> str:
        return format_pipeline_in_line(self)

    def html(self) -> str:
        """Returns the plan as a self-contained page for a browser; in a notebook a plan shows itself as this page."""
        return format_pipeline_page(self)

    def programs(self) -> dict[str, Plan]:
        """Returns the plans of the stages' programs by name, such as "stage_0_forward"; each is a plan of its own."""
        documents = [content for _, content in self.decisions if isinstance(content, dict) and "plan" in content]
        plans = [plan_from_json(document["plan"], "the plan of a pipeline", Plan) for document in documents]
        return {plan.function: plan for plan in plans}

    def apply(
        self,
        fn: Callable[..., Any],
        devices: Any,
        *,
        hardware: Hardware | str | None = None,
        check: Literal["numbers"] | None = None,
    ) -> "PipelinedFunction[PipelinePlan]":
        """Gives a training step this plan without a search; returns a callable as `diffshard.search` does.

        >>> step = diffshard.PipelinePlan.load("plan.json").apply(train_step, jax.devices())
        >>> state, loss = step(state, batch)

        Args:
          fn: the training step that the plan was made for.
          devices: as many as the plan's, in hosts of as many, in the same order: JAX devices, or a `Cluster`.
          hardware: of JAX devices, as in `diffshard.search`; None takes them for what the plan was made for, if that is
            one preset and none of them is known to be another one, else for what they are. A `Cluster` has its own.
          check: "numbers" holds the first call against one device, as in `diffshard.search`.

        Raises:
          PlanError: the plan does not fit the devices or the function. What depends on the function's arguments is told
            when the step is planned or called.
          TypeError, ValueError: an argument breaks a rule.
        """
        if check not in ("numbers", None):
            raise ValueError(f'`check` must be "numbers" or None, not {check!r}: the plan is made.')
        if hardware is None and not isinstance(devices, Cluster):
            hardware = self._preset_for(devices)
        is_offloading = any(stage.num_offloaded for stage in self.all_stages)
        limits = {stage.memory_limit_bytes * self.stages_per_device for stage in self.all_stages}
        pipeline = Pipeline(
            batch_argnums=self.roles.batch_argnums,
            batch_argnames=self.roles.batch_argnames,
            microbatches=self.num_microbatches,
            schedules=(self.schedule,),
            predicted_steps=self.predicted_steps,
            stages_per_device=max(self.stages_per_device, 2),
            max_stages=max(len(self.stages), Pipeline.max_stages),
            batch_means=self.batch_means,
            residuals=("keep", "offload") if is_offloading else ("keep",),
        )
        try:
            options = pipeline_options(
                fn,
                devices,
                pipeline,
                hardware,
                memory_limit_bytes=limits.pop() if len(limits) == 1 else None,
                donate_argnums=self.roles.donate_argnums,
                donate_argnames=self.roles.donate_argnames,
                static_argnums=self.roles.static_argnums,
                static_argnames=self.roles.static_argnames,
                checks_numbers=check is not None,
            )
        except ValueError as error:
            if "_argn" not in str(error):
                raise
            raise PlanError(f"The plan does not fit the function: {error}") from None
        check_cluster(self, options.cluster)
        return PipelinedFunction(options, PipelinePlan, partial(_applied, self))

    def _preset_for(self, devices: Any) -> str | None:
        """Returns the preset that the plan was made for; None where there is none, and for devices of other presets."""
        presets = {device_and_network(name)[0].name: name for name in PRESET_NAMES}
        own = presets.get(self.stages[0].hardware.split(", shared by ")[0]) if self.cluster.count(" x ") == 1 else None
        for device in devices if isinstance(devices, Sequence) else getattr(devices, "flat", ()):
            with contextlib.suppress(ValueError):  # of a kind that has no preset
                if getattr(device, "platform", "cpu") != "cpu" and preset_name_of(device.device_kind) != own:
                    return None
        return own


def _applied(
    plan: PipelinePlanData,
    options: PipelineOptions,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    processes: Processes,
    line: LiveLine,
) -> FoundPipeline:
    """Returns the pipeline of a plan; what `PipelinedFunction` calls in place of a search."""
    progress, what = SearchProgress(line, None), "apply the same plan"
    progress.step("tracing")
    count, batch, num_groups = plan.num_microbatches * plan.num_groups, options.pipeline.batch, plan.num_groups

    def traced() -> list[UncutStep]:
        return [uncut_step(options.fn, count, batch, args, kwargs, num_groups, batch_means=plan.batch_means)]

    processes.check_alike(what, {"the plan": digest_of({"the plan": json.dumps(to_json(plan))})})
    steps = processes.alike(what, traced, trace_facts)
    donated = donated_arrays(options, args, kwargs)
    return applied_pipeline(plan, [StepSearch(options, step, donated, progress) for step in steps], processes)
