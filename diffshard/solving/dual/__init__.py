"""The lower bound: messages and prices, the climb, the same dual for JAX with gradients, and branching on it."""
