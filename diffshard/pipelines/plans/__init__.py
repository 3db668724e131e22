"""Plans of pipelines as users keep them, laid out as `diffshard.plans` is for shardings.

`base.py` has the records of a plan. `plan.py` makes the plan that a search ends with, which `text.py` and `page.py`
show. `schedule_drawing.py` draws when each stage does what, as `consistency.py` simulates it from the plan's own
numbers. `consistency.py` also has the files of plans, and what the fields of a loaded plan must have to do with each
other.
"""
