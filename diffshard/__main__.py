"""The command `diffshard`, also as `python -m diffshard`: it answers Ctrl-C while everything else is imported.

The first Ctrl-C is an exception, which lets a search return its best plan. A library may swallow an exception, so a
second Ctrl-C ends the process at once.
"""

import signal
import sys
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130


def main() -> int:
    """Runs the command with the words of the process and returns its exit code."""
    signal.signal(signal.SIGINT, _on_interrupt)
    try:
        from diffshard.command.line import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("diffshard: interrupted\n")
        return _INTERRUPTED


def _on_interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
