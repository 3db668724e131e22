"""Embedding tables on devices: `shard_tables` in `search.py` plans, `TablePlan` in `plan.py` runs.

`layout.py` says where each piece of a table lies in the arrays of its device, `lookup.py` and `update.py` are the
programs of all devices, `reference.py` is the same on one device.
"""
