"""Training steps cut for pipelines: into micro-batches, and into stages."""
