"""Plans judged by the programs that XLA makes of them.

`judging.py` compiles plans in processes of their own and reads time, bytes and memory off their programs. `compare.py`
is `diffshard.compare`, which does that for the plans that a user gives, and `checked_search.py` is the search with a
`check`, which returns the best. What they return is `diffshard.plans.comparison.Comparison`.
"""
