"""Pipelines: which layers make a stage, and on which devices it runs."""
