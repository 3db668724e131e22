"""Changes of a choice, which solvers and phases are made of.

- `single_nodes.py`: single nodes, each to its best strategy given the others, or so that loads are level.
- `tree_moves.py`: many nodes at once, exactly, because no cycle joins them, at memory prices that answer to each move.
- `random_moves.py`: random changes, of single nodes by many chains under parallel tempering, or of disjoint
  neighbourhoods of nodes.
"""
