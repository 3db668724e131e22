"""Plans judged by the programs that XLA makes of them.

`compare.py` compiles the plans that a user gives in processes of their own, and reads time, bytes and memory off their
programs (`diffshard.compare`), and `checked_search.py` is the search with a
`check`, which returns the best. What they return is `diffshard.plans.comparison.Comparison`.
"""
