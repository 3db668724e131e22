"""The solvers, one file each; `diffshard.solve(problem, solver=NAME)` takes the file's name.

How to choose:

- `gradient`, the default: any size, with a certified lower bound. Seconds for thousands of nodes.
- `exact`: HiGHS on a mixed-integer programme, for up to about a thousand nodes; proves the optimum, given time.
- `exhaustive`: every choice; the oracle for problems of a few nodes.
"""
