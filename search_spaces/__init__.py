"""What can be chosen: each space turns its input into a `Problem` and a choice back into something that runs.

`base.py` states what a space must have. The folder `sharding` has the space of shardings of a function's arrays, the
folder `communication` that of the strategies of a loss's collectives; `placement.py` places layers on devices, and
`numbered.py` is the space of a bare problem. `partition_specs.py` and `replay.py` serve several spaces:
they read and write `PartitionSpec`s, and run the equations of a traced function again.
"""
