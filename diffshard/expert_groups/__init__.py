"""Mixtures of experts on unequal workers: `group_experts` in `grouping.py`, `assign_experts` in `assignment.py`.

`merging.py` is the published heuristic, `subsets.py` finds the best groups of a few workers. For more, `candidates.py`
makes the groups that the solver chooses from, and `bounds.py` says what no division is faster than. `plans.py` has the
results and `arguments.py` the checks of what users give.

`layout.py` puts the experts of a plan on a mesh. `layer_program.py` is the layer that runs there, `exchanges.py` what
its devices send each other, and `expert_moves.py` how experts change their device.
"""
