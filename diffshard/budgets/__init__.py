"""Plans for a job whose devices change over time, chosen together with the moves of its state between them."""
