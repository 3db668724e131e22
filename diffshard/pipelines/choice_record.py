"""A folder that keeps what searches for pipelines have decided, for the next start of the same program.

In a job of several processes the first one decides, and every process makes the pipeline of what it says. A file has
the same messages in the same order, so that the first process can read them in place of deciding.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from diffshard.base import PlanError
from diffshard.files import replace_file
from diffshard.plans.documents import DAMAGE, check_checksum, check_stored, read, text_of
from diffshard.processes import Processes
from diffshard.sharding_search.fingerprints import digest_of

T = TypeVar("T")
_FORMAT, _VERSION = "diffshard stored pipeline", 1


@dataclass
class ChoiceRecord:
    """What a search has decided, in order; mutable.

    Attributes:
      path: of its file; "" for one that is not kept.
      key: a hash of what is asked for.
      messages: pairs of what was decided, and the text of it.
      num_taken: how many messages were taken in place of deciding.
      is_whole: whether the messages are those of a whole search, all of which fit so far.
    """

    path: str = ""
    key: str = ""
    messages: list[tuple[str, str]] = field(default_factory=list)
    num_taken: int = 0
    is_whole: bool = False

    @classmethod
    def of(cls, folder: str | None, facts: Mapping[str, str]) -> "ChoiceRecord":
        """Returns the record of an earlier search for the same; an empty one if there is none.

        A file that is damaged, or not one of this folder, is told in a warning and replaced.

        Args:
          folder: where records are kept; None keeps nothing.
          facts: texts by name on which the search depends.
        """
        if folder is None:
            return cls()
        key = digest_of(facts)
        path = os.path.join(folder, f"{key}.json")
        try:
            messages = _messages(read(path), key, path)
        except FileNotFoundError:
            return cls(path, key)
        except (PlanError, OSError) as error:
            warnings.warn(f"A pipeline in the store cannot be used, and is searched again: {error}", stacklevel=2)
            return cls(path, key)
        return cls(path, key, messages, is_whole=True)

    def decided(self, what: str, make: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]) -> T:
        """Returns what an earlier search decided, or else decides and writes it down.

        Args:
          what: what is decided.
          make: decides it.
          pack: writes it as bytes of a text.
          unpack: reads it.
        """
        if self.is_whole and self.num_taken < len(self.messages) and self.messages[self.num_taken][0] == what:
            try:
                made = unpack(self.messages[self.num_taken][1].encode())
            except DAMAGE as error:
                warnings.warn(f"A pipeline in the store is searched again from `{what}` on: {error}", stacklevel=2)
            else:
                self.num_taken += 1
                return made
        self.is_whole = False
        del self.messages[self.num_taken :]
        made = make()
        if self.path:
            self.messages.append((what, pack(made).decode()))
            self.num_taken += 1
        return made

    def keep(self) -> None:
        """Writes the file, unless everything came from it; where that is not possible, it is told in a warning."""
        if not self.path or self.is_whole:
            return
        document = {"format": _FORMAT, "version": _VERSION, "key": self.key, "messages": self.messages}
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            replace_file(self.path, text_of(document))
        except OSError as error:
            warnings.warn(f"The pipeline cannot be kept in the store: {error}", stacklevel=2)


@dataclass(frozen=True)
class RecordingProcesses(Processes):
    """Processes whose first one reads what it decides from a record, as far as that has it.

    Attributes:
      record: what was decided.
    """

    record: ChoiceRecord = field(default_factory=ChoiceRecord)

    def _from_first(
        self, what: str, name: str, make: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]
    ) -> T:
        return super()._from_first(what, name, partial(self.record.decided, what, make, pack, unpack), pack, unpack)


def _messages(document: Any, key: str, path: str) -> list[tuple[str, str]]:
    """Returns the messages of a file.

    Raises:
      PlanError: it is damaged, of another version, or was written for another key.
    """
    check_stored(document, _FORMAT, _VERSION, key, path)
    try:
        check_checksum(document)
        return [(str(what), str(text)) for what, text in document["messages"]]
    except DAMAGE as error:
        raise PlanError(f"`{path}` is a damaged record of a pipeline: {error}.") from None
