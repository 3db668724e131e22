"""The engine behind the solvers: problems as flat arrays, the dual and its climb, exact moves, and neighbourhoods.

`flat.py` lays a problem out; `dual.py` passes messages and `ascent.py` climbs with prices, `soft_dual.py` is the same
sweep for JAX with gradients; `branching.py` raises the dual's bound by forbidding strategies. `tied.py` solves equal
layers as one, for a start; `forest.py`, `polish.py` and `neighbourhoods.py` improve a choice, `descent.py` and
`replicas.py` do so node by node for many choices at once.
"""
