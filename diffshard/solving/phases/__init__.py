"""The phases of `gradient`: each is a small frozen object in a file of its own, and a solver is a list of them.

A `Climb` raises the dual's bound and reads starts off it; then phases improve one choice, the `Search`'s, one after the
other or side by side. `base.py` states both protocols. A new phase is a new file; `solvers/gradient.py` lists those of
the default, and an experiment that leaves one out lists the others.
"""
