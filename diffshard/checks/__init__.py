"""A plan held against the compilers: Shardy's collectives, XLA's program and memory, and results on real devices."""
