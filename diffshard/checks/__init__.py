"""Checks of a plan: its prediction against what compilers make of it.

- A prediction: `verify.py` compares collectives and memory with Shardy's and XLA's. `collectives.py` finds the
  collectives of a compiled program in its text, which `hlo.py` parses; `explicit_collectives.py` finds those that
  Shardy's partitioner needs. Both return `CollectiveRecord`s. `hlo.py` also reads XLA's
  plan of memory.
- Compilers: `targets.py` has everything that can be compiled for, also GPUs that need not be there, with the rates of
  timelines. `compilation.py` compiles steps in processes of their own.
- Time: `timeline.py` plays a compiled GPU program back: when each kernel and each collective runs, by the work that
  `kernel_work.py` counts, and its rates. `timeline_lanes.py` draws it, and writes it as a trace.
"""
