"""Training steps cut for pipelines: into micro-batches, and into the programs of stages."""
