"""Steps and arguments for the command line: `diffshard search experiments.models.examples:gpt_7b_step ...`."""

from typing import Any

from flax import linen as nn

from experiments.models import gpt
from experiments.models.model import abstract_arguments

_GPT_7B = gpt.make(
    batch=16,
    block=nn.remat(gpt.Block),
    stack=gpt.scanned,
    layers=32,
    width=4096,
    heads=32,
    key_value_heads=32,
    sequence=2048,
    vocabulary=32768,
)
gpt_7b_step = _GPT_7B.step


def gpt_7b_arguments() -> tuple[Any, Any]:
    """Returns state and batch of a GPT with 6.6 billion parameters, as shapes."""
    return abstract_arguments(_GPT_7B)
