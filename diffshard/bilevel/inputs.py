"""What the functions of a search are called with, checked before anything is traced."""

from typing import Any

from diffshard.bilevel.state import BilevelState


def check_state(state: Any) -> None:
    """Refuses what is no state of a search.

    Raises:
      ValueError: says what it is, and how a state is had.
    """
    if isinstance(state, BilevelState):
        return
    if isinstance(state, tuple) and state and isinstance(state[0], BilevelState):
        raise ValueError(
            "`state` must be a BilevelState, got a tuple that begins with one; `update` returns two things: "
            "`state, metrics = search.update(state, train_batch, val_batch)`."
        )
    raise ValueError(
        f"`state` must be a BilevelState, as `init` and `update` give, and comes before batches; "
        f"got {type(state).__name__}."
    )
