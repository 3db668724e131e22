"""Bad inputs by the thousand: what is said about them is true, and what is refused is refused by a clear error.

A kind of cases is a file: `plans.py`, `bilevel_plans.py`, `instances.py`, `problems.py`, `scales.py`, `functions.py`.
`random_functions.py` makes functions; `truth.py` prices small problems without rounding; `outcomes.py` has what a case
can end in.
"""
