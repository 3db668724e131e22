"""What can be chosen: each space turns its input into a `Problem` and a choice back into something that runs."""
