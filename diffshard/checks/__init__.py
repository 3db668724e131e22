"""Checks of a plan: its prediction against what compilers make of it, and its results against those on one device.

`verify.py` compares predicted collectives and memory with Shardy's and XLA's. `collectives.py` finds the collectives of
a compiled program in its text, which `hlo.py` parses; `explicit_collectives.py` finds those that Shardy's partitioner
needs. Both return the records of `collective_records.py`. `gpu_target.py` compiles for GPUs that are not there;
`targets.py` has them with the rates of their timelines, and `compilation.py` compiles steps for them in processes of
their own.
`equal_results.py` runs a function with and without its plan. `timeline.py` plays a compiled GPU program back: when each
kernel and each collective runs, by the work that `kernel_work.py` counts and the rates of `achievable_rates.py`.
"""
