"""Solving a `Problem`: a cheap choice, and a bound on how cheap any choice can be. The entry is `solve` in `solve.py`.

A problem passes through these rooms:

- `presolve/` makes the problem smaller without changing its optimum, and leads back from a choice of the smaller one.
- `loop.py` runs a solver: it prices its proposals exactly, keeps the best, and watches the time and Ctrl-C, and knows
  what sums in float64 may lose.
- `solvers/` has a file for each solver, and says how to choose among them. The default, `gradient`, is composed of the
  objects in `phases/`.
- `dual/` has the Lagrangian dual: messages and prices, the ascent that gives the lower bound, and branching on it.
- `moves/` has what improves a choice: exact moves of forests, neighbourhoods, single nodes and Markov chains.

All of them work on the same layout, a problem in compressed sparse rows (`csr.py`). `form.py` writes problems in other
forms, `contest.py` reads and writes the files of the IOPDDL contest, and `examples.py` has two small problems for the
solvers' `EXAMPLE`s.
"""
