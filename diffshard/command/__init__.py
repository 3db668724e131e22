"""The command `diffshard`.

`line.py` parses what is typed and calls one of three commands: search and show in `plan_commands.py`, solve in
`solve_command.py`. `arguments.py` turns words into values and refuses wrong ones before any work; `terminal.py` shows
progress.
"""
