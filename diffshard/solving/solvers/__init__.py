"""The solvers, one file each; `diffshard.solve(problem, solver=NAME)` takes the file's name.

How to choose:

- `gradient`, the default: any size, memory and loads, with a certified lower bound. Take it unless you know better.
- `exact`: HiGHS on a mixed-integer program (the extra `exact`): proves the optimum of up to a few hundred nodes,
  given time; its bound is there even when the time is not enough.
- `dynamic_programming`: chains, trees and every graph that comes apart at few nodes, exactly and at once. With loads,
  amounts or memory that binds it is a heuristic with a weak bound.
- `exhaustive`: every choice; the oracle for problems of a few nodes.
- `primal`: the plain relaxation, softmax logits and Adam: small problems.
- `mcmc`, `beam`, `greedy`, `random`: what others use and what is easy, to compare with. None of them has a bound.

A new solver is a new file with a function `solve` that follows `diffshard.base.Solver` and an `EXAMPLE`: a function
without arguments that makes a small problem whose optimum the solver reaches, such as those of
`diffshard/solving/examples.py`. The conformance tests find it there and hold it to the same rules as the others. If it
proves the optimum of its example, it has to prove those of other small problems too.
"""
