"""Hardware that `search` plans for: measured on the devices that are here, and kept in a file for later searches.

>>> measured = diffshard.hardware.calibrate(mesh)
>>> diffshard.hardware.save_hardware(measured, "hardware.json")
>>> step = diffshard.search(train_step, mesh, hardware=diffshard.hardware.load_hardware("hardware.json"))

`rent` (in `renting.py`) says which of several clusters with prices does most steps for the money.
`PRESET_NAMES` are known without a measurement, by `diffshard.preset`. A `Line` is what a collective takes by its bytes.
"""

from collections.abc import Sequence
from os import PathLike

from jax.sharding import Mesh

from cost.base import Hardware
from cost.calibration import calibrate as measured_hardware
from cost.clusters import Submesh
from cost.lines import Line
from cost.presets import PRESET_NAMES
from diffshard.plans.documents import HARDWARE, RecordFile
from diffshard.processes import errors_for_all, processes_of
from diffshard.renting import Offer, PlannedOffer, Rental, rent

__all__ = [
    "PRESET_NAMES",
    "Line",
    "Offer",
    "PlannedOffer",
    "Rental",
    "Submesh",
    "calibrate",
    "load_hardware",
    "rent",
    "save_hardware",
]

_FILE = RecordFile(HARDWARE, 2)


def calibrate(
    mesh: Mesh,
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    matrix_size: int = 2048,
    largest_bytes: int = 2**26,
    repeats: int = 7,
) -> Hardware:
    """Measures one device and the links of a mesh by running on it.

    All devices work at the same time, as they do in a step, so what they share (the cores of simulated devices, a
    host's memory) is shared in the result too. Takes seconds to a few minutes. With `jax.distributed` each process that
    owns devices of the mesh calls it with the same arguments, and all get what the first of them has measured.

    Args:
      mesh: real devices.
      dtypes: types of the matrix products that are timed.
      matrix_size: rows and columns of the product on each device.
      largest_bytes: the largest array on one device, for links and memory bandwidth. The smallest is 4 KiB, or less
        where gathering that from all devices of an axis would be larger than the largest.
      repeats: calls that each time is the median of.

    Returns:
      Hardware with a link for each axis (zeros for an axis of one device).

    Raises:
      ValueError: an abstract mesh, or a size or number of repeats that is too small.
      ProcessesError: the processes give different arguments, or another one failed.
    """
    what = "measure the hardware"
    sizes = {"matrix_size": matrix_size, "largest_bytes": largest_bytes, "repeats": repeats}
    with errors_for_all(mesh if isinstance(mesh, Mesh) else None, what):
        if not isinstance(mesh, Mesh):
            return measured_hardware(mesh, dtypes=dtypes, **sizes)  # which raises the error
        facts = {"`mesh`": str(dict(mesh.shape)), "`dtypes`": str(tuple(dtypes))}
        facts |= {f"`{name}`": str(value) for name, value in sizes.items()}
        processes = processes_of(mesh)
        processes.check_alike(what, facts)
        measured = measured_hardware(mesh, dtypes=dtypes, **sizes)
        return processes.shared(what, lambda: measured, kind=Hardware)


def save_hardware(hardware: Hardware, path: str | PathLike[str]) -> None:
    """Writes hardware as JSON; the file is replaced whole or not at all.

    Raises:
      OSError: the file cannot be written.
    """
    _FILE.save(hardware, path)


def load_hardware(path: str | PathLike[str]) -> Hardware:
    """Reads hardware back, as `diffshard calibrate` and `save_hardware` write it.

    >>> step = diffshard.search(train_step, mesh, hardware=diffshard.hardware.load_hardware("hardware.json"))

    Raises:
      PlanError: the file is not one of hardware, damaged, or newer than this version.
      OSError: the file cannot be read.
    """
    return _FILE.load(path, Hardware)
