"""Mixtures of experts on unequal workers: which workers form groups, and which of them holds which expert.

>>> assignment = diffshard.experts.assign_experts([3, 3, 3, 2], [42, 56], [1, 3])
>>> layout = assignment.layout(mesh, "expert")
>>> routed = layout.apply(expert, params, x, logits, num_chosen=2, capacity_factor=1.25)

`group_experts` is in `grouping.py`, `assign_experts` in `assignment.py`.

`divisions.py` has the published heuristic, and finds the best groups of a few workers. For more it makes the groups
that the solver chooses from, and says what no division is faster than. `plans.py` has the results.

`layout.py` puts the experts of a plan on a mesh. `layer_program.py` is the layer that runs there, with what
its devices send each other, and `expert_moves.py` how experts change their device.
"""

from typing import TYPE_CHECKING

from diffshard.public_names import lazy_names

if TYPE_CHECKING:
    from diffshard.experts.assignment import assign_experts as assign_experts
    from diffshard.experts.expert_moves import ExpertLoads as ExpertLoads
    from diffshard.experts.grouping import group_experts as group_experts
    from diffshard.experts.grouping import reassign_experts as reassign_experts
    from diffshard.experts.layer_program import RoutedTokens as RoutedTokens
    from diffshard.experts.layout import ExpertLayout as ExpertLayout
    from diffshard.experts.plans import ExpertAssignment as ExpertAssignment
    from diffshard.experts.plans import GroupPlan as GroupPlan

__getattr__, __dir__, __all__ = lazy_names(__name__)
