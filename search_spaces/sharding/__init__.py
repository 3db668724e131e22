"""The sharding space: which dimension of which array of a traced function is split over which mesh axis.

`base.py` and `graph.py` hold the vocabulary; `space.py` puts everything together as a `Problem`, with a table of its
terms. Their parts, from the function to a plan that runs:

- the function: `tracing.py` makes a graph of it, `given.py` reads the shardings that it fixes;
- what can be chosen: `shardy.py` gives each operation its rule (`exceptional_rules.py` where Shardy has none,
  `factors.py` for rules made of several), `dimensions.py` tells which dimensions are the same, `strategies.py` lists
  what a rule allows and `candidates.py` what a node chooses from;
- what it costs: `node_costs.py`, `edge_costs.py` and `memory.py`; `resharding.py` finds the steps between two specs and
  `reshard_costs.py` prices them;
- what a choice means: `explaining.py` in seconds and names; as something that runs, `evaluation.py` with one of two
  executors: `execution.py` constrains whole arrays, and `device_program.py` runs on the blocks of each device
  (`local_blocks.py` has the collectives, `local_operations.py` the operations, `whole_operations.py` those that have no
  form on blocks); `schedule.py` says when a device's collectives run, `scheduling.py` decides it, window by window of
  `windows.py`.
"""
