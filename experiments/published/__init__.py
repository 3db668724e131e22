"""Training runs that others published, rebuilt as JAX training steps, and the prices of the kernels they measured."""
