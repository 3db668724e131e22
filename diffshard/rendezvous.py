"""A rendezvous of processes in the key-value store of JAX's coordination service.

A process that ends leaves a note (`exit_notices.py`). One that is killed cannot: JAX's service notices that it sends
nothing any more, after a hundred seconds if the user does not say otherwise, and aborts all others, which cannot be
caught. So each process that has come to an exchange writes a new number into the store every few seconds, its pulse,
and the others find in time that it has stopped.

JAX has no public name for the client of that service. It is reached through `jax.experimental.multihost_utils`, whose
`distributed` is a private module of JAX. Relied upon are `distributed.global_state`, its `process_id`, its `client`,
None without the service, and the client's methods in `_METHODS`; a version of JAX without them is named in an error.
"""

import atexit
import hashlib
import itertools
import json
import threading
import time
import warnings
import zlib
from collections.abc import Mapping
from typing import Any

import jax

from diffshard.base import ProcessesError
from diffshard.exit_notices import ENDED, service_state

ARRIVAL_LIMIT_S = 600.0
"""How long processes wait for one that has not come to a rendezvous: it may restore a checkpoint, or never come."""
WARNING_S = 60.0
"""Seconds after which a process says whom it waits for."""
_POLL_MS = 1000
"""One question to the service; between two a process notices Ctrl-C."""
_PIECE_BYTES = 2**20
"""The largest value in the store: messages of gRPC are limited to a few MiB."""
_FAILURE = "failure"
"""The kind of exchange for which a process comes that has failed already."""
_SHOWN_DIFFERENCES = 5
_SHOWN_CHARACTERS = 200


class MissingError(Exception):
    """A process has ended, or has not come in time; the text is a sentence that says which and how."""


class Rendezvous:
    """One exchange between processes that all come to it, with a place of its own in the key-value store.

    The first process says at "arrival" what kind of exchange it has come for. To compare facts it puts a digest of its
    own at "digest", each other one its answer at "answer/NUMBER": empty, or its facts if they differ, or its error. The
    first process puts its verdict at "verdict", empty if all is well. What it makes for all, or gathers from all, it
    puts at "result". A process that failed before it came puts that in the place of its arrival or answer.

    Exchanges are numbered, and each process counts for itself. Those with a name have numbers of their own, which begin
    anew after each exchange without a name, because the first process may do alone what has a name.
    """

    _lock = threading.Lock()
    _client: Any = None
    _counts: dict[tuple[tuple[int, ...], str], int] = {}  # noqa: RUF012
    _old: dict[tuple[int, ...], list[str]] = {}  # noqa: RUF012

    def __init__(self, client: Any, indices: tuple[int, ...], number: str, what: str, name: str):
        self.client, self.indices, self.what = client, indices, what
        members = hashlib.sha256(repr((indices, name)).encode()).hexdigest()[:16]
        self.place = f"diffshard/{members}/{number}"

    @classmethod
    def next_of(cls, indices: tuple[int, ...], what: str, name: str = "") -> "Rendezvous":
        """Returns the next exchange of these processes, of those with this name."""
        client = service_client()
        if client is None:
            raise ProcessesError(
                f"{len(indices)} processes have to agree to {what}, but JAX's coordination service does not run. Call "
                "`jax.distributed.initialize()` at the start of each process."
            )
        with cls._lock:
            if client is not cls._client:  # `jax.distributed` was started anew
                cls._client, cls._counts, cls._old = client, {}, {}
                keep_pulse(client)
            if not name:
                cls._counts = {key: n for key, n in cls._counts.items() if key[0] != indices or not key[1]}
            number = cls._counts[indices, name] = cls._counts.get((indices, name), -1) + 1
            since = cls._counts.get((indices, ""), -1)
        rendezvous = cls(client, indices, f"{since}/{number}" if name else str(number), what, name)
        if rendezvous.is_first:  # which deletes what the others have read
            cls._old.setdefault(indices, []).append(rendezvous.place)
        return rendezvous

    @property
    def is_first(self) -> bool:
        """Whether this process decides."""
        return jax.process_index() == self.indices[0]

    def put(self, name: str, value: bytes) -> None:
        """Puts a value into the store, in pieces."""
        packed = zlib.compress(value, level=1)
        pieces = [packed[i : i + _PIECE_BYTES] for i in range(0, max(len(packed), 1), _PIECE_BYTES)]
        for i, piece in enumerate(pieces):
            self.client.key_value_set_bytes(f"{self.place}/{name}/{i}", piece)
        self.client.key_value_set_bytes(f"{self.place}/{name}/count", str(len(pieces)).encode())

    def get(self, name: str, process: int, *, limit_s: float | None = None) -> bytes:
        """Waits for a value that a process puts; that process is named in a warning if it takes long to come.

        Args:
          limit_s: the seconds within which it has to come; None for a process that has come already, and works.

        Raises:
          MissingError: the process has ended or was killed, or did not put it within the limit.
        """
        count = int(self._wait(f"{self.place}/{name}/count", process, limit_s))
        return zlib.decompress(b"".join(self._wait(f"{self.place}/{name}/{i}", process, None) for i in range(count)))

    def arrive(self, kind: str) -> str:
        """Tells the others the kind of the exchange; returns a sentence where the first one came for another kind.

        It is "" in the first process, which does not wait.
        """
        if self.is_first:
            self.put("arrival", json.dumps([kind, self.what]).encode())
            return ""
        first = self.indices[0]
        try:
            other_kind, other = json.loads(self.get("arrival", first, limit_s=ARRIVAL_LIMIT_S))
        except MissingError as error:
            return str(error)
        if other_kind == kind:
            return ""
        if other_kind == _FAILURE:
            return other
        problem = f"process {first} is about to {other}, process {jax.process_index()} to {self.what}"
        self.put(f"answer/{jax.process_index()}", json.dumps({"failure": problem}).encode())
        return problem

    def fail(self, error: BaseException, place: str) -> None:
        """Tells the other processes that this one failed.

        Args:
          place: where the others wait for the first process: at "arrival" if it has not arrived yet, else at "digest"
            or "result".
        """
        process = jax.process_index()
        failure = f"process {process} failed with {type(error).__name__}: {error}"
        content = [_FAILURE, failure] if self.is_first and place == "arrival" else {"failure": failure}
        self.put(place if self.is_first else f"answer/{process}", json.dumps(content).encode())

    def problem_with(self, facts: Mapping[str, str]) -> str:
        """Compares facts, and returns a sentence on what is wrong with those of some process; "" if nothing is."""
        content = {"what": self.what, **facts}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        if self.is_first:
            self.put("digest", json.dumps({"digest": digest}).encode())
            problem = self._problem_of_others(content)
            self.put("verdict", problem.encode())
            return problem
        first = self.indices[0]
        try:
            document = json.loads(self.get("digest", first, limit_s=ARRIVAL_LIMIT_S))
            if "failure" in document:
                return document["failure"]
            answer = {} if document["digest"] == digest else {"facts": content}
            self.put(f"answer/{jax.process_index()}", json.dumps(answer).encode())
            return self.get("verdict", first).decode()
        except MissingError as error:
            return str(error)

    def gathered(self, own: str) -> list[str]:
        """Returns a text of each process, in order of their numbers; the own one is of this process."""
        first, *others = self.indices
        if not self.is_first:
            self.put(f"answer/{jax.process_index()}", json.dumps({"text": own}).encode())
            result = json.loads(self.get("result", first))
            if "failure" in result:
                raise MissingError(result["failure"])
            return result["texts"]
        texts, end = [own], time.monotonic() + ARRIVAL_LIMIT_S
        try:
            for other in others:
                limit_s = max(0.0, end - time.monotonic())
                answer = json.loads(self.get(f"answer/{other}", other, limit_s=limit_s))
                if "failure" in answer:
                    raise MissingError(answer["failure"])
                texts.append(answer["text"])
        except MissingError as error:
            self.put("result", json.dumps({"failure": str(error)}).encode())
            raise
        self.put("result", json.dumps({"texts": texts}).encode())
        return texts

    def _problem_of_others(self, content: Mapping[str, str]) -> str:
        first, *others = self.indices
        end = time.monotonic() + ARRIVAL_LIMIT_S
        for other in others:
            limit_s = max(0.0, end - time.monotonic())
            try:
                answer = json.loads(self.get(f"answer/{other}", other, limit_s=limit_s))
            except MissingError as error:
                return str(error)
            if "failure" in answer:
                return answer["failure"]
            if answer:
                return "; ".join(differences(content, answer["facts"], first, other))
        # All came here, so that none reads what earlier exchanges left.
        old = self._old[self.indices]
        for place in old[:-1]:
            self.client.key_value_delete(place)
        del old[:-1]
        return ""

    def _wait(self, key: str, process: int, limit_s: float | None) -> bytes:
        start, has_warned, ended = time.monotonic(), False, None
        pulse, pulse_start = None, start
        while True:
            try:
                return self.client.blocking_key_value_get_bytes(key, _POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if ended is not None:  # and so it has not put the value before its end
                raise MissingError(ended)
            ended = how_ended(self.client, process)
            if (last := pulse_of(self.client, process)) != pulse:
                pulse, pulse_start = last, time.monotonic()
            elif pulse is not None and time.monotonic() - pulse_start > SILENCE_S:
                raise MissingError(
                    f"process {process} has been killed or stands still, as it gave no sign of life for "
                    f"{SILENCE_S:.0f} s"
                )
            waited_s = time.monotonic() - start
            if ended is None and limit_s is not None and waited_s > limit_s:
                raise MissingError(f"process {process} did not come within {ARRIVAL_LIMIT_S:.0f} s")
            if limit_s is not None and waited_s > WARNING_S and not has_warned:
                has_warned = True
                warnings.warn(
                    f"Process {jax.process_index()} waits for process {process}, to {self.what}. Every "
                    "process of the mesh has to do so.",
                    stacklevel=2,
                )


def differences(facts: Mapping[str, str], others: Mapping[str, str], process: int, other: int) -> list[str]:
    """Returns a sentence for each fact that differs between two processes; of many the first ones.

    Args:
      facts: of the first process, by name. Of texts of several lines the first line that differs is shown.
      others: of the second one.
      other: the number of the second one.
    """
    names = [name for name in dict.fromkeys((*facts, *others)) if facts.get(name) != others.get(name)]
    sentences = []
    for name in names[:_SHOWN_DIFFERENCES]:
        line, own, theirs = _first_difference(facts.get(name), others.get(name))
        subject = "one is about to" if name == "what" else f"{name} is"
        at = f" at line {line}" if line else ""
        sentences.append(f"{subject}{at} {own} in process {process} and {theirs} in process {other}")
    more = len(names) - len(sentences)
    return [*sentences, f"and {more} more differ"] if more > 0 else sentences


def _first_difference(own: str | None, theirs: str | None) -> tuple[int, str, str]:
    """Returns the first line in which two texts differ: its number, 0 where there is one line only, and both lines."""
    own_lines, their_lines = (("missing",) if text is None else text.split("\n") for text in (own, theirs))
    pairs = itertools.zip_longest(own_lines, their_lines, fillvalue="the end")
    number, (a, b) = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    has_lines = len(own_lines) > 1 or len(their_lines) > 1
    return number if has_lines else 0, _short(a), _short(b)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


_METHODS = ("key_value_set_bytes", "blocking_key_value_get_bytes", "key_value_try_get_bytes", "key_value_delete")
"""The methods of the service's client that are used. The last one deletes a place and everything below it."""
_PULSE = "diffshard/pulse"
"""Where the pulses are, by the numbers of processes."""
PULSE_S = 2.0
"""Seconds between two numbers: nothing for the service, also with a thousand processes."""
SILENCE_S = 40.0
"""Seconds without a new number after which a process counts as lost: many numbers that did not come. It is well below
the time after which JAX aborts, and above what a library may compute without letting another thread run."""


def service_client() -> Any:
    """Returns the client of JAX's coordination service; None where it does not run."""
    state = service_state()
    client = getattr(state, "client", None)
    if not hasattr(state, "client") or (client is not None and not all(hasattr(client, name) for name in _METHODS)):
        raise ProcessesError(
            f"JAX {jax.__version__} has another coordination service than diffshard {_version()} knows, so that "
            "several processes cannot agree. Take the version of JAX with which diffshard was released, or a newer "
            "diffshard."
        )
    return client


def how_ended(client: Any, process: int) -> str | None:
    """Returns a sentence on how a process has ended; None while it runs, or if it was killed."""
    return _found(client, f"{ENDED}/{process}")


def pulse_of(client: Any, process: int) -> str | None:
    """Returns the last number of a process; None if it has written none."""
    return _found(client, f"{_PULSE}/{process}")


def keep_pulse(client: Any) -> None:
    """Writes this process's pulse, in a thread, until the process or the service ends."""
    is_over, key = threading.Event(), f"{_PULSE}/{jax.process_index()}"

    def beat() -> None:
        for number in itertools.count():
            try:
                client.key_value_set_bytes(key, str(number).encode(), allow_overwrite=True)
            except Exception:  # the service has ended, or been left
                return
            if is_over.wait(PULSE_S):
                return

    thread = threading.Thread(target=beat, name="diffshard pulse", daemon=True)
    thread.start()

    def end() -> None:  # before Python's own end, which must not meet the thread in the client
        is_over.set()
        thread.join()

    atexit.register(end)


def _found(client: Any, key: str) -> str | None:
    try:
        return client.key_value_try_get_bytes(key).decode()
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def _version() -> str:
    import diffshard  # the package, which imports its modules when they are first used

    return diffshard.__version__
