"""Objectives of your own: JAX functions of a step's seconds and memory that `search` makes small in place of seconds.

>>> def energy_j(step):
...     return 700.0 * step.seconds + 2.0 * sum(step.link_s.values())
>>> step = diffshard.search(train_step, mesh, objective=energy_j)

`RelaxedStep` is what such a function gets. `Objective`, `Quantity` and `LiveMemory` state one for a problem of your
own, which `diffshard.solve` takes.
"""

from typing import TYPE_CHECKING

from diffshard.public_names import lazy_names

if TYPE_CHECKING:
    from cost.quantities import LiveMemory as LiveMemory
    from cost.quantities import Quantity as Quantity
    from diffshard.sharding_search.step_objective import RelaxedStep as RelaxedStep
    from diffshard.solving.objectives.objective import Objective as Objective

__getattr__, __dir__, __all__ = lazy_names(__name__)
