"""The phases of `gradient`: each is a small frozen object, and a solver is a list of them.

A `DualAscent` raises the dual's bound and reads starts off it; then phases improve one choice, the `Search`'s, one
after the other or side by side. `starts.py` states both protocols. `default_phases` in `solvers/gradient.py` chooses
those that suit a problem, and an experiment leaves one of them out.
"""
