"""Kinds and widths of dtypes, by name."""

_KIND_AND_BITS = {
    **{f"float{bits}": ("float", bits) for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": ("int", bits) for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)},
    "bfloat16": ("float", 16),
    "complex64": ("float", 32),
    "complex128": ("float", 64),
    "bool": ("int", 8),
}


def kind_and_bits(dtype: str) -> tuple[str, int]:
    """Returns "float" or "int", and the width of one number in bits; of a complex number that of its real part."""
    if dtype.startswith(("float8", "float4")):
        return "float", int(dtype[5])
    if dtype in _KIND_AND_BITS:
        return _KIND_AND_BITS[dtype]
    # Random keys and whatever dtype comes next: 32 bits of integer arithmetic is what they are made of.
    if dtype.startswith("key<") or dtype == "float0":
        return "int", 32
    raise ValueError(f"`dtype` {dtype!r} is not a dtype's name such as 'float32', 'bfloat16' or 'int8'.")
