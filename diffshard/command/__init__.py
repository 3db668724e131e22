"""The command `diffshard`: search a plan, show one, solve an instance of the contest."""
