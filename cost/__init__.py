"""What a choice costs: the `Problem`, hardware, collectives, compute and memory."""
