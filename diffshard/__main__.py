"""`python -m diffshard` is the command `diffshard`."""

import sys

from diffshard.command.line import main

if __name__ == "__main__":
    sys.exit(main())
