"""Plans of pipelines as users keep them, laid out as `diffshard.plans` is for shardings.

`base.py` has the records of a plan. `plan.py` makes the plan that a search ends with, which `text.py` shows and
`file.py` saves and loads. `timing.py` simulates its schedule again from its own numbers. `consistency.py` has what the
fields of a loaded plan must have to do with each other.
"""
