"""Plans of the bilevel search as users keep them, laid out as `diffshard.plans` is for shardings.

`base.py` has the records of a plan and of the candidates that were trained. `plan.py` makes the plan that a search
ends with, which `text.py` and `page.py` show, `training.py` runs. `file.py` saves and loads, and has
what the fields of a loaded plan must have to do with each other. `pareto.py` draws the loss of several choices against
their step time.
"""
