"""Agreement between the processes of a job of `jax.distributed`: they compare facts, and take what one of them made.

Everything goes through the key-value store of JAX's coordination service, not through collectives on devices. So one
process can search for as long as it takes once it has come; the processes that do not own a device of the mesh need not
take part; and nothing is compiled. A process that does not come within `ARRIVAL_LIMIT_S` is an error in the others. So
is one that has ended, or has failed on the way here (`errors_for_all`), within seconds. One that is killed is noticed
by the service, which ends the others.

Errors travel as JSON values: no bytes of another process are ever run as code. An error comes back with its own type if
that is one of Python's or of these packages; of others only the text does.
"""

import builtins
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
from jax.extend.backend import backends
from jax.sharding import AbstractMesh, Mesh

from diffshard.base import ProcessesError
from diffshard.plans.json_values import from_json_values, to_json_values
from diffshard.rendezvous import ARRIVAL_LIMIT_S, MissingError, Rendezvous, service_client

T = TypeVar("T")
_KNOWN = "is known to all processes"
"""The name of an attribute of errors that all processes have."""


def processes_of(mesh: Mesh | AbstractMesh | None) -> "Processes":
    """Returns the processes that own devices of a mesh; one alone if this one owns none, or there are no devices.

    Devices for which programs can only be compiled, such as those of `gpu_mesh`, belong to no process: their process
    indices are the numbers of hosts that are not here. Only devices of JAX's running backends count.
    """
    if not isinstance(mesh, Mesh):
        return Processes((0,))  # whichever it is; to ask would start JAX's backend, which plans do not need
    own, running = jax.process_index(), list(backends().values())
    indices = {device.process_index for device in mesh.devices.flat if device.client in running}
    return Processes(tuple(sorted(indices)) if own in indices else (own,))


def all_processes() -> "Processes":
    """Returns all processes of the job; there is one without `jax.distributed`."""
    return Processes(tuple(range(jax.process_count())))


@contextlib.contextmanager
def errors_for_all(mesh: Any, what: str) -> Iterator[None]:
    """Tells an error inside to the other processes of a mesh: their next exchange raises it, as `ProcessesError`.

    So a process whose arguments are wrong does not leave the others waiting for it. It takes the place of this process
    in that exchange, so that all processes go on together if they all raise an error. An error that comes out of an
    exchange is known to all, and is not told again.

    Args:
      mesh: whose processes are told: none for an abstract mesh, all of the job for what is no mesh.
      what: what this process is about to do, for errors.
    """
    try:
        yield
    except Exception as error:
        if not (isinstance(error, ProcessesError) or _KNOWN in vars(error)):
            with contextlib.suppress(Exception):  # the error itself is what this process has to raise
                _processes_that_wait(mesh).tell(what, error)
        raise


def _processes_that_wait(mesh: Any) -> "Processes":
    if isinstance(mesh, Mesh | AbstractMesh) or service_client() is None:
        return processes_of(mesh if isinstance(mesh, Mesh) else None)
    return all_processes()


@dataclass(frozen=True)
class Processes:
    """Processes that agree. All of them call the same methods in the same order; a process alone just goes on.

    Attributes:
      indices: their numbers in the job, ascending; the first one decides what is decided once.
    """

    indices: tuple[int, ...]

    @property
    def is_one(self) -> bool:
        """Whether there is nobody to agree with."""
        return len(self.indices) == 1

    @property
    def is_first(self) -> bool:
        """Whether this process decides what is decided once."""
        return self.is_one or jax.process_index() == self.indices[0]

    @property
    def place(self) -> int:
        """The place of this process among them, from 0."""
        return 0 if self.is_one else self.indices.index(jax.process_index())

    def check_alike(self, what: str, facts: Mapping[str, str]) -> None:
        """Compares texts between the processes.

        Args:
          what: what they are about to do, for errors: "search a plan of train_step".
          facts: by name, such as "`memory_limit_bytes`", what has to be the same in all.

        Raises:
          ProcessesError: a text differs, in all processes; says which, in which processes, and both texts. Or a process
            did not come within `ARRIVAL_LIMIT_S`.
        """
        self.alike(what, lambda: None, lambda _: facts)

    def alike(self, what: str, make: Callable[[], T], facts: Callable[[T], Mapping[str, str]]) -> T:
        """Makes something in every process, checks that it is alike, and returns this process's own.

        Args:
          what: what they are about to do, for errors.
          make: makes it; the error of one process becomes an error of all.
          facts: texts about it, by name, as in `check_alike`.
        """
        if self.is_one:
            return make()
        rendezvous = Rendezvous.next_of(self.indices, what)
        if self.is_first:
            rendezvous.arrive("compare")
        try:
            made = make()
            own_facts = dict(facts(made))
        except BaseException as error:
            rendezvous.fail(error, "digest")
            vars(error)[_KNOWN] = True
            raise
        if problem := (not self.is_first and rendezvous.arrive("compare")) or rendezvous.problem_with(own_facts):
            raise ProcessesError(f"The processes cannot {what}: {problem}")
        return made

    def tell(self, what: str, error: BaseException) -> None:
        """Tells the others that this process has failed; takes its place in the exchange to which they come next."""
        if not self.is_one:
            Rendezvous.next_of(self.indices, what).fail(error, "arrival")
            vars(error)[_KNOWN] = True

    def shared(
        self,
        what: str,
        make: Callable[[], T],
        *,
        kind: Any = Any,
        pack: Callable[[T], bytes] | None = None,
        unpack: Callable[[bytes], T] | None = None,
    ) -> T:
        """Makes something in the first process only, and returns it in all, however long making it takes.

        Args:
          what: what is made, for errors: "search a plan of train_step".
          make: makes it. Its error is raised in all processes, with the same type if that is one of Python's or of
            diffshard's own.
          kind: the type of what is made: numbers, texts, records and tuples of these, as `from_json_values` takes it.
          pack: writes it as bytes for the other processes; None writes it as JSON.
          unpack: reads the bytes; None reads JSON of a `kind`.

        Raises:
          ProcessesError: the first process raised an error of another type, does something else, or did not come
            within `ARRIVAL_LIMIT_S`.
        """
        return self._from_first(what, "", make, pack or _pack, unpack or partial(_unpack, kind))

    def gathered(self, what: str, make: Callable[[], T]) -> list[T]:
        """Makes something in every process, and returns in all what each has made, in order of their numbers.

        Args:
          make: makes JSON values, for which it may take `ARRIVAL_LIMIT_S` longer than in the fastest process.
        """
        if self.is_one:
            return [make()]
        rendezvous = Rendezvous.next_of(self.indices, what)
        if problem := rendezvous.arrive("gather"):
            raise ProcessesError(f"The processes cannot {what}: {problem}.")
        try:
            made = make()
        except BaseException as error:
            rendezvous.fail(error, "result")
            vars(error)[_KNOWN] = True
            raise
        try:
            return [json.loads(text) for text in rendezvous.gathered(json.dumps(made))]
        except MissingError as error:
            raise ProcessesError(f"The processes cannot {what}: {error}.") from None

    def in_first(self, what: str, name: str, act: Callable[[], None], content: Mapping[str, str]) -> None:
        """Does something in the first process; in each other one that calls this, waits until it is done.

        It is no error if the first process does it alone, as a program that asks for `jax.process_index() == 0` does.

        Args:
          what: what is done, for errors: "save a plan".
          name: tells it from everything else that is done this way, such as the path of a file.
          act: does it. Its error is raised in all processes.
          content: texts by name about what is written, which are the same in all processes. They tell this time from
            one before, when the first process did it alone with something else.

        Raises:
          ProcessesError: as `shared`; or the first process did not do it with this content within `ARRIVAL_LIMIT_S`.
        """
        texts = json.dumps(dict(content), sort_keys=True)
        self._from_first(what, f"{what}: {name}: {texts}", act, _pack, partial(_unpack, Any))

    def _from_first(
        self, what: str, name: str, make: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]
    ) -> T:
        if self.is_one:
            return make()
        rendezvous = Rendezvous.next_of(self.indices, what, name)
        if not name and (problem := rendezvous.arrive("share")):
            raise ProcessesError(f"The processes cannot {what}: {problem}")
        if self.is_first:
            try:
                made = make()
                packed = pack(made)
            except BaseException as error:
                vars(error)[_KNOWN] = True
                rendezvous.put("result", _pack([what, packed_error(error)]))
                raise
            rendezvous.put("result", b"\n".join([_pack([what, None]), packed]))
            return made
        first, limit_s = self.indices[0], ARRIVAL_LIMIT_S if name else None
        try:
            head, _, packed = rendezvous.get("result", first, limit_s=limit_s).partition(b"\n")
        except MissingError as error:
            if name:
                raise ProcessesError(f"Process {first} did not {what} that is this process's: {error}.") from None
            raise ProcessesError(f"The processes cannot {what}: {error}.") from None
        asked_for, error = json.loads(head)
        if asked_for != what:
            raise ProcessesError(f"Process {first} is about to {asked_for}, this one to {what}.")
        if error is not None:
            raise error_of(error, first)
        return unpack(packed)


def _pack(value: Any) -> bytes:
    return json.dumps(to_json_values(value), allow_nan=False).encode()


def _unpack(kind: Any, content: bytes) -> Any:
    return from_json_values(kind, json.loads(content))


_OWN_PACKAGES = ("cost", "diffshard", "search_spaces")


def packed_error(error: BaseException) -> dict[str, Any]:
    """Returns an error as JSON values."""
    kind = type(error)
    packed = {"text": f"{kind.__name__}: {error}"}
    if not isinstance(error, Exception):  # an interrupt is for one process
        return packed
    file = [error.filename] if isinstance(error, OSError) and error.filename is not None else []
    whole = {
        **packed,
        "module": kind.__module__,
        "name": kind.__qualname__,
        "arguments": [*error.args, *file],
        "fields": vars(error),
    }
    try:
        return json.loads(json.dumps(whole, allow_nan=False))
    except (TypeError, ValueError):  # it has something else than texts and numbers
        return packed


def error_of(packed: dict[str, Any], process: int) -> Exception:
    """Returns the error that another process has packed."""
    kind = _class_of(packed.get("module", ""), packed.get("name", ""))
    try:
        assert kind is not None
        error = kind(*packed["arguments"])
        vars(error).update(packed["fields"])
        error.add_note(f"This error is that of process {process}.")
    except Exception:
        return ProcessesError(f"Process {process} failed with {packed['text']}")
    return error


def _class_of(module: str, name: str) -> type[Exception] | None:
    """Returns the class of an error by its name; None if it is not one of those that are known here."""
    if module != builtins.__name__ and module.partition(".")[0] not in _OWN_PACKAGES:
        return None
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None
