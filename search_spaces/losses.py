"""What a user's `loss_fn(params, batch)` must be: a function that returns the loss alone, not a whole training step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_NOT_A_STEP = (
    "Of a training step `(state, batch) -> (state, loss)` give the function that it differentiates, and as `params` "
    "the parameters alone, without the state of the optimiser: a search takes its steps with `weights_optimizer`."
)


def traced_loss(trace: Callable[..., Any], *arguments: Any) -> Any:
    """Returns `trace(*arguments)`, which traces a loss; an error in it has a note on what a loss must be."""
    try:
        return trace(*arguments)
    except Exception as error:
        error.add_note(f"This was raised in `loss_fn(params, batch)`. {_NOT_A_STEP}")
        raise


def check_is_loss(result: Any) -> None:
    """Checks that a function with results of some shapes is a loss."""
    if _is_floating(result) and result.shape == ():
        return
    leaves = jax.tree.leaves(result)
    is_array = isinstance(result, jax.ShapeDtypeStruct)
    what = f"{result.dtype}{list(result.shape)}" if is_array else f"a {type(result).__name__} of {len(leaves)} arrays"
    has_loss = not is_array and any(_is_floating(leaf) and leaf.shape == () for leaf in leaves)
    advice = _NOT_A_STEP if has_loss else "Reduce it, as by `jnp.mean`."
    raise ValueError(f"`loss_fn` must return one floating-point scalar, the loss, but it returns {what}. {advice}")


def check_are_parameters(names_and_dtypes: dict[str, Any]) -> None:
    """Checks that arrays can be trained."""
    for name, dtype in names_and_dtypes.items():
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"`params` {name!r} is {dtype}; parameters must be floating-point, put it in `batch`. {_NOT_A_STEP}"
            )


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.floating)
