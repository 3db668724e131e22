"""Training steps in micro-batches, and the division of layers into stages."""
