"""Training steps cut for pipelines, into micro-batches."""
