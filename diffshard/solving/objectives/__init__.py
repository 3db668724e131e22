"""Objectives that are not sums: the gradient of a cost chooses, and the solvers of sums answer it.

Over mixtures of choices a differentiable cost has tangents, and a tangent is a `Problem`. So the solvers of problems
are the linear minimisation oracle of a Frank-Wolfe method, with certified bounds: `minimise.py` has the loop.
"""
