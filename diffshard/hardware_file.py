"""Hardware as JSON files, so that what was measured once is known to each search after it."""

from os import PathLike

from cost.base import Hardware
from diffshard.plans.documents import HARDWARE, RecordFile

_FILE = RecordFile(HARDWARE, 1)


def save_hardware(hardware: Hardware, path: str | PathLike[str]) -> None:
    """Writes hardware as JSON; the file is replaced whole or not at all.

    Raises:
      OSError: the file cannot be written.
    """
    _FILE.save(hardware, path)


def load_hardware(path: str | PathLike[str]) -> Hardware:
    """Reads hardware back, as `diffshard calibrate` and `save_hardware` write it.

    >>> step = diffshard.search(train_step, mesh, hardware=diffshard.load_hardware("hardware.json"))

    Raises:
      PlanError: the file is not one of hardware, damaged, or newer than this version.
      OSError: the file cannot be read.
    """
    return _FILE.load(path, Hardware)
