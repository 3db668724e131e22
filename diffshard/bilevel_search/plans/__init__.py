"""Plans of the bilevel search as users keep them, laid out as `diffshard.plans` is for shardings.

`base.py` has the records of a plan and of the candidates that were trained, and what the fields of a loaded plan must
have to do with each other. `plan.py` makes the plan that a search ends with, which `views.py` shows and `training.py`
runs; it also draws the loss of several choices against their step time.
"""
