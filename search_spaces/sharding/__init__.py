"""The sharding space: which dimension of which array of a traced function is split over which mesh axis.

`base.py` and `graph.py` hold the vocabulary; `space.py` puts everything together as a `Problem`, with a table of its
terms. Their parts, from the function to a plan that runs:

- the function: `tracing.py` makes a graph of it, `given.py` reads the shardings that it fixes;
- what can be chosen: `shardy.py` gives each operation its rule (`rules.py` where Shardy has none, and for rules made of
  several), `strategies.py` lists what a rule allows and `nodes.py` what a node chooses from; `spec.py` has
  the functions of specs, `repetition.py` finds what is equal, so that it is built and solved once;
- what it costs: `node_costs.py`, `edge_costs.py` and `memory.py`. `kernels.py` counts what is read, written and
  copied, by what a compiler fuses (`fusion.py`); `resharding.py` finds the steps between two specs, and
  `reshard_costs.py` prices them;
- what a choice means: in seconds and names by `explaining.py`; as something that runs by `interpreter.py`, with one of
  two executors: `execution.py` constrains whole arrays, and `device_program.py` runs on the blocks of each device
  (`local_blocks.py` has the collectives, `local_operations.py` the operations, `replicated_operations.py` those that
  have no form on blocks). `schedule.py` has the vocabulary of when collectives start and end, and `scheduling.py`
  decides it, window by window.
"""
