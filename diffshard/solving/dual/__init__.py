"""The lower bound: the Lagrangian dual of a problem, with messages on its edges and prices on its limits.

- `sweeps.py`: one min-plus pass over all edges, which raises the bound at given prices.
- `ascent.py`: the ascent, sweeps and price steps in turn, and branch and bound on the dual.
"""
