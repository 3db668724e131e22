"""Changes of a choice, which solvers and phases are made of.

- `descent.py`: single nodes, each to its best strategy given the others.
- `forest.py`: many nodes at once, exactly, because no cycle joins them.
- `polish.py`: forest moves at memory prices that answer to each move.
- `neighbourhoods.py`: disjoint balls of nodes, perturbed at once and accepted each by itself.
- `chains.py`: random changes of single nodes by many chains, under parallel tempering.
"""
