"""What XLA compiles convolutions of float8 numbers to on H100s: the types that their kernels read and write.

    python -m experiments.float8_convolutions [--width 256]

A convolution of 3 x 3 and both of its backward products, as JAX makes them, and a product of matrices have operands in
float8 (e4m3) and a result in some type. They are compiled for an H100, which needs the extra `gpu-compile`; nothing
runs.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from diffshard.checks.hlo import arrays, parse
from experiments.tables import print_table
from experiments.targets import MESHES

RESULTS = ("float32", "bfloat16", "float8_e4m3fn")
_NAMES = ("forward convolution", "gradient of its kernel", "gradient of its input")
_KERNELS = ("__cudnn$", "__cublas$", "calls=%gemm_fusion")
"""Marks of the instructions that multiply: calls of libraries, and kernels that XLA writes itself."""


def products(width: int) -> dict[str, Any]:
    """Returns the equations of a convolution with its backward products, and of a product of matrices, by names."""

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def all_products(x: jax.Array, kernel: jax.Array, matrix: jax.Array) -> Any:
        result, transposed = jax.vjp(convolve, x, kernel)
        return transposed(result), matrix @ matrix

    shapes = (8, 32, 32, width), (3, 3, width, width), (4 * width, 4 * width)
    jaxpr = jax.make_jaxpr(all_products)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    convolutions = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    (product,) = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    return {**dict(zip(_NAMES, convolutions, strict=True)), "product of matrices": product}


def kernel_types(equation: Any, result: str, sharding: NamedSharding) -> tuple[list[str], str]:
    """Returns the types of both operands that the kernel of an equation reads, and of what it writes."""
    params = {**equation.params, "preferred_element_type": jnp.dtype(result)}
    operands = [jax.ShapeDtypeStruct(v.aval.shape, jnp.float8_e4m3fn, sharding=sharding) for v in equation.invars]
    program = jax.jit(lambda *blocks: equation.primitive.bind(*blocks, **params)).lower(*operands).compile()
    module = parse(program.as_text() or "")
    entry = module.computations[module.entry]
    (kernel,) = [i for i in entry.instructions if any(name in i.attributes for name in _KERNELS)]
    read = [arrays(entry.by_name[name].type)[0][0] for name in kernel.operands[:2]]
    return read, arrays(kernel.type)[0][0]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help="channels; a quarter of the matrices' sides")
    options = parser.parse_args(argv)
    sharding = NamedSharding(MESHES["h100"]((8,)), PartitionSpec())
    rows = []
    for name, equation in products(options.width).items():
        for result in RESULTS:
            read, written = kernel_types(equation, result, sharding)
            rows.append([name, result, " x ".join(read), written])
    columns = ["product of float8 numbers", "result asked for", "kernel reads", "writes"]
    print_table("kernels on an H100", columns, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
