"""Plans judged by the programs that XLA makes of them.

`judging.py` compiles plans in processes of their own and reads time, bytes and memory off their programs. `compare.py`
is `diffshard.compare`, which does that for the plans that a user gives; `base.py` has what it returns, `text.py` and
`page.py` show it.
"""
