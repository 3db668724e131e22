"""The Lagrangian dual: messages, prices, the climb, the same sweep for JAX, and branching on it."""
