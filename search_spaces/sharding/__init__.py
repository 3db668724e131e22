"""The sharding space: which dimension of which array of a traced function is split over which mesh axis.

`graph.py` traces and `shardy.py` gives each operation its rule; `strategies.py` and `candidates.py` list what can be
`graph.py` traces, `shardy.py` gives each operation its rule; `strategies.py` and `candidates.py` list what can be
two choices, `lifetimes.py` what lives when; `space.py` puts it together as a `Problem`.
"""
