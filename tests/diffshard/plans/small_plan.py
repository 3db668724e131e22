"""A plan made by hand, small enough to work out every number that a report shows."""

import math

from cost.base import Hardware, Link
from diffshard.plans.base import Operation, PredictedCollective, Tensor
from diffshard.plans.sections import HeldTensor, MemoryProfile, PredictedComputing
from diffshard.sharding_search.plan import Plan

DATA, MODEL = ("data",), ("model",)
# A device holds 256 bytes of each argument, and as much of the product of layer_1 while layer_1 runs forward.
MEMORY = MemoryProfile(
    changes=((-1, 768.0), (4, 1024.0), (5, 768.0)),
    at_peak=(HeldTensor(4, 0, 256.0), HeldTensor(0, 0, 256.0), HeldTensor(1, 0, 256.0), HeldTensor(2, 0, 256.0)),
)


def operation(signature, scope, spec, compute_s, source="/home/me/net.py:7:3 (Net.__call__)"):
    specs = (spec,)
    return Operation("operation", signature, source, scope, (), specs, specs, specs, 1.0, compute_s, reductions=((),))


def small_plan(**changes):
    """Two layers on 2 x 4 devices: step 10 ms = 6 ms + 3 ms + 1 ms; a device holds 3 x 256 bytes of arguments."""
    column = ((), MODEL)
    arguments = (
        Tensor("state['layer_0']['w']", (16, 16), "float32", column, False, ((), ()), 2e-3),
        Tensor("state['layer_1']['w']", (16, 16), "float32", column, False, ((), ()), 2e-3),
        Tensor("batch", (32, 4), "float32", (DATA, ()), True),
    )
    inputs = tuple(
        Operation(
            "input", f"input() -> {t.dtype}{list(t.shape)}", "", "", (), (t.spec,), (t.spec,), (t.spec,), 1.0, 0.0
        )
        for t in arguments
    )
    product = "dot_general(float32[32,16], float32[16,16]) -> float32[32,16]"
    operations = (
        *inputs,
        operation(product, "jvp(Net)/layer_0/dense", (DATA, MODEL), 1e-3),
        operation(product, "jvp(Net)/layer_1/dense", (DATA, MODEL), 1e-3),
        operation(product, "transpose(jvp(Net))/layer_1/dense", (DATA, ()), 2e-3),
        operation(product, "transpose(jvp(Net))/layer_0/dense", (DATA, ()), 2e-3),
        operation(
            "add(float32[16,16], float32[16,16]) -> float32[16,16]", "", column, 0.0, "/opt/<adam>.py:1:2 (scale)"
        ),
    )
    collectives = (
        PredictedCollective("all_reduce", "data", 512.0, 1.0, 1.5e-3, 5, 1.5e-3, 5, 7),
        PredictedCollective("all_reduce", "data", 512.0, 1.0, 1.5e-3, 6, 1.5e-3, 6, 7),
        PredictedCollective("all_gather", "model", 2048.0, 1.0, 1e-3, 7, 1e-3, 7, 0),
    )
    fields = {
        "function": "make.<locals>.train_step",
        "mesh_axes": {"data": 2, "model": 4},
        "hardware": Hardware("toy", 1e9, 1e9, 4096.0, {"data": Link(0.0, 1e-6), "model": Link(0.0, 1e-6)}),
        "memory_limit_bytes": 4096.0,
        "arguments": arguments,
        "outputs": arguments[:2],
        "operations": operations,
        "compute_s": 6e-3,
        "collectives": collectives,
        "peak_bytes": 1024.0,
        "lower_bound_s": 9e-3,
        "status": "finished",
        "solver": "gradient",
        "search_s": 1.5,
        "history": ((0.1, math.inf, -math.inf), (0.2, 12e-3, 8e-3), (1.0, 10e-3, 9e-3)),
        "parameters": ("state", "batch"),
        "memory": MEMORY,
        "computing": PredictedComputing(4e-3, 0.5, 2e-3, 0.25),
        "function_digest": "",
        "notes": ("frobnicate has no sharding rule and runs whole on every device (1x, <net>.py:3).",),
    }
    return Plan(**{**fields, **changes})
