"""Ablations and benchmarks, each a script with `main()`: run one by `python -m experiments.NAME`."""
