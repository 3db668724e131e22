"""Plans by the rules of papers, to compare with: data parallel, FSDP, Megatron and their mixtures, for any function.

>>> plans = diffshard.baselines.baseline_plans(train_step, mesh, state, batch)
>>> print(diffshard.compare(train_step, mesh, state, batch, plans=plans))

`base.py` has the baselines: each gives every argument a spec by a rule that its paper states. It says what they know
about an argument, and which dimension of a parameter Megatron splits. `plans.py` is
`diffshard.baselines.baseline_plans`, which completes their shardings to plans.
"""

from typing import TYPE_CHECKING

from diffshard.public_names import lazy_names

if TYPE_CHECKING:
    from diffshard.baselines.plans import BaselinePlans as BaselinePlans
    from diffshard.baselines.plans import baseline_plans as baseline_plans

__getattr__, __dir__, __all__ = lazy_names(__name__)
