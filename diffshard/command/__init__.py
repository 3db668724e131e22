"""The command `diffshard`.

`line.py` parses what is typed and calls a command: those on plans are in `plan_commands.py`, and solve in
`solve_command.py`. `arguments.py` turns words into values and refuses wrong ones
before any work; it also shows progress.
"""
