"""Ablations and benchmarks, each a script with `main()`: run one by `python -m experiments.NAME`.

By the question that they answer (`docs/measured` has their tables):

- Do plans compute the same, and are they good? `equal_results.py`, `known_good.py`, and beside plans by hand
  (`hand_plans.py`) `peers.py`; by the time of compiled programs `timeline.py`, with its models in `timeline_models.py`
  and its rows in `timeline_table.py`; `schedule.py` for what a program's schedule is worth. `demo.py` shows one plan.
- Are predictions true? `truth.py` for bytes and memory, `compute_prediction.py` for computing, `collectives.py` for
  links, `calibration.py` for arithmetic, `encoding_seconds.py` for codes.
- How good and how fast is the search? `speed.py`, `solvers.py`, `iopddl.py` and `placement.py`, on problems that
  `layered.py` generates, with the solvers of `solver_variants.py`.
- How near to their bounds are groups of workers for a mixture of experts? `expert_groups.py`.
- Are divisions into pipeline stages the best, and are their times true? `pipelines/`.
- Does the bilevel search's gradient help? `bilevel.py` runs `bilevel_loss.py`, `bilevel_estimators.py`,
  `bilevel_relaxation.py`, `bilevel_initialisation.py` and `bilevel_overhead.py`. They share `bilevel_tasks.py`,
  `bilevel_training.py` and `bilevel_searches.py`.
- Would a fault be noticed? `planted_faults` plants some in a copy of the code and runs the related tests;
  `fuzzing/` has bad inputs by the thousand.

All share the meshes of `host_devices.py` and `targets.py`, `tables.py`, and the example models in `models/`.
"""
