"""The sharding space: which dimension of which array of a traced function is split over which mesh axis.

`tracing.py` makes a `graph.py`, `shardy.py` gives each operation its rule; `strategies.py` and `candidates.py` list
what can be chosen; `resharding.py` and `prices.py` say what lies between two choices, `lifetimes.py` what lives when;
`space.py` puts it together as a `Problem`, `predict.py` says what a choice costs place by place.
"""
