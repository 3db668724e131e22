"""The sharding search: from a function and a mesh to a plan, and from a plan to a function that runs in parallel.

`diffshard/front_end.py` puts the steps together: the arguments of a search (`options.py`), the function traced for the
shapes of its arguments, with the space of everything that can be chosen (`tracing.py`; all of these are a
`request.py`), and the solved space written down as a plan (`planning.py`). What is made small is in
`step_objective.py`: the seconds of a step or a user's function of it. `predictions.py` writes down what a plan keeps in
memory, how its program's steps follow each other, and what it leaves whole. `plan.py` has what users do with a plan.
`planned_function.py` is the callable that both `search` and `Plan.apply` return, and `executors.py` has the ways in
which it runs; `layout.py` translates between the names in a plan and the numbers in a space.
"""
