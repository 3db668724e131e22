"""What a choice costs, and what hardware takes for it. Nothing here knows of search spaces, solvers or plans.

- `base.py`: the vocabulary. A `Problem` (nodes with strategies, edges, memory usages, loads), the `Evaluation` of a
  choice, `Hardware` and its `Link`s, `Work`, `CostModel`. `lines.py`: seconds as the least of a few lines in bytes.
- A problem: `evaluation.py` prices a choice exactly, and weights in its place, with a gradient; `memory.py` sums usages
  over time, `edges.py` merges the matrices of edges, `validation.py` holds a problem from outside against the rules.
- Cost models, from sizes and hardware to seconds: `collectives.py` by such lines, `compute.py` by roofline. A new
  one is a file with an `EXAMPLE`; `tests/conformance/test_cost_models.py` finds it.
- What was measured of GPUs: `measured_rates.py` has laws of products and attention, `calibration.py` hardware with
  them.
- Hardware: `presets.py` has the common kinds, `networks.py` says which link a
  mesh axis gets, `clusters.py` joins hosts of several kinds, `calibration.py` measures it, and `lines.py` fits lines to
  what was measured.
"""
