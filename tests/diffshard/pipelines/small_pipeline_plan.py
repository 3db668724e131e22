"""A plan of a pipeline of two kinds of devices, whose numbers follow from each other."""

from diffshard.pipelines.plan import PipelinePlan
from diffshard.pipelines.plans.base import PlannedStage
from diffshard.plans.base import Tensor

GIB = 2.0**30
TIMES = ((3e-3, 6e-3, 1e-3, 2e-3), (4e-3, 8e-3, 1e-3, 1e-3), (2e-3, 5e-3, 0.0, 0.0))


def stage(i, devices, hardware, arguments):
    forward_s, backward_s, send_forward_s, send_backward_s = TIMES[i]
    return PlannedStage(
        first_layer=4 * i,
        last_layer=4 * i + 3,
        source=f"model.py:{10 + i} (train_step.<locals>.loss_fn)",
        hardware=hardware,
        mesh_axes={"x": 2, "y": len(devices) // 2},
        devices=devices,
        forward_s=forward_s,
        backward_s=backward_s,
        end_s=1e-3 * i,
        send_forward_s=send_forward_s,
        send_backward_s=send_backward_s,
        in_flight=3 - i,
        peak_bytes=(3 - i) * 4 * GIB,
        memory_limit_bytes=16 * GIB,
        residual_bytes=GIB,
        arguments=arguments,
    )


def small_pipeline_plan(**changes) -> PipelinePlan:
    """Three stages of 1F1B with four micro-batches, which take 66 ms, and up to 2 ms for the end of the step."""
    tensors = (
        Tensor("state[0]['up']", (512, 2048), "float32", ((), ("x", "y"))),
        Tensor("state[0]['down']", (2048, 512), "float32", (("x",), ())),
    )
    fields = {
        "function": "train_step",
        "cluster": "1 hosts of 4 x A100-80GB, 2 hosts of 2 x T4-16GB",
        "num_devices": 8,
        "num_layers": 12,
        "num_microbatches": 4,
        "schedule": "1f1b",
        "stages": (
            stage(0, (0, 1, 2, 3), "A100-80GB", tensors),
            stage(1, (4, 5), "T4-16GB", tensors[:1]),
            stage(2, (6, 7), "T4-16GB", ()),
        ),
        "step_s": 0.068,
        "bubble": 1 - (36 + 48 + 28) / (3 * 66),
        "lower_bound_s": 0.06,
        "search_s": 3.2,
        "tried": ((4, "1f1b", 0.065), (4, "eager", 0.07), (8, "1f1b", float("inf")), (8, "eager", 0.08)),
        "notes": ("A note about <this> plan.",),
        **changes,
    }
    return PipelinePlan(**fields)
