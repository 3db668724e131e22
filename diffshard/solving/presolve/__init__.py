"""Exact reductions of a `Problem`, each with an exact way back: the reduced optimum expands to the original one.

- `pipeline.py`: `presolve`, all of them in the order that leaves the least. Tie merging comes first: it
  merges nodes that determine each other and removes forbidden entries.
- `memory.py` keeps the times at which the memory limit can bind.
- `elimination.py` removes nodes of degree up to two, separable edges, and strategies that another one dominates.
"""
