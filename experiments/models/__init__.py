"""Training steps of the kinds that people write in JAX, one small file each, all of one shape: `model.Model`."""
