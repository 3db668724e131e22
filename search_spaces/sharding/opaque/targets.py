"""What known opaque operations lower to for GPUs.

`jax.export` only lets through what JAX guarantees for years. Here the same version of JAX compiles what it has lowered,
so these are let through too.
"""

PALLAS_TARGETS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")
"""Pallas calls, by Triton and by Mosaic."""
CUDNN_TARGETS = tuple(
    f"__cudnn$fmha{bias}Softmax{dropout}{backward}"
    for bias in ("", "ScaleBias")
    for dropout in ("", "Dropout")
    for backward in ("", "Backward")
)
"""cuDNN's attention."""
CUSTOM_CALL_TARGETS = (*PALLAS_TARGETS, *CUDNN_TARGETS)
"""All of them."""
