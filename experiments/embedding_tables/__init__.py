"""Embedding tables on devices: generated tasks and MLPerf's tables, beside greedy placements and beam search."""
