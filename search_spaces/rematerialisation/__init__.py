"""Rematerialisation: what goes from a step's forward pass to its backward pass is kept or computed again."""
