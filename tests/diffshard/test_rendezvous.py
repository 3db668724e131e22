"""Exchanges between processes that do not call alike, with a store in this process; and what is relied upon of JAX."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.experimental import multihost_utils

from diffshard import processes, rendezvous
from diffshard.base import ProcessesError
from diffshard.processes import Processes
from diffshard.rendezvous import Rendezvous

BOTH = Processes((0, 1))


class _Store:
    """A key-value store of this process, which has what the coordination service has."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        assert key not in self.values, f"{key} was put twice"
        self.values[key] = value

    def key_value_try_get_bytes(self, key: str) -> bytes:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.values[key]

    def key_value_delete(self, place: str) -> None:
        self.values = {key: value for key, value in self.values.items() if not key.startswith(f"{place}/")}

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        del timeout_ms
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]


def _state() -> Any:
    return multihost_utils.distributed.global_state  # pyright: ignore[reportPrivateImportUsage]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> _Store:
    store = _Store()
    monkeypatch.setattr(_state(), "client", store)
    for module in (rendezvous, processes):
        monkeypatch.setattr(module, "ARRIVAL_LIMIT_S", 0.0)
    return store


@pytest.fixture
def as_process(store: _Store, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Goes on as another process, which has counts of its own."""
    counts: dict[int, Any] = {0: ({}, {}), 1: ({}, {})}
    current: list[int] = []

    def switch(process: int) -> None:
        if current:
            counts[current.pop()] = Rendezvous._counts, Rendezvous._old
        current.append(process)
        monkeypatch.setattr(Rendezvous, "_client", store)
        monkeypatch.setattr(Rendezvous, "_counts", counts[process][0])
        monkeypatch.setattr(Rendezvous, "_old", counts[process][1])
        monkeypatch.setattr(jax, "process_index", lambda: process)

    return switch


def _save(content: str, written: list[str]) -> None:
    BOTH.in_first("save a plan", "/x", lambda: written.append(content), {"content": content})


def test_what_the_first_process_did_alone_is_not_what_the_others_wait_for(as_process: Callable[[int], None]):
    written: list[str] = []
    as_process(0)
    _save("old", written)  # alone
    as_process(1)
    with pytest.raises(ProcessesError, match="did not save a plan"):
        _save("new", written)
    assert written == ["old"]


def test_the_others_go_on_when_the_first_process_has_done_it(as_process: Callable[[int], None]):
    written: list[str] = []
    as_process(0)
    _save("old", written)  # alone
    _save("new", written)
    as_process(1)
    _save("new", written)
    assert written == ["old", "new"]


@pytest.mark.parametrize(
    "act",
    [lambda: BOTH.shared("search", lambda: 1), lambda: BOTH.check_alike("search", {})],
    ids=["shared", "alike"],
)
def test_another_kind_of_exchange_in_the_first_process_is_an_error(
    as_process: Callable[[int], None], act: Callable[[], Any]
):
    as_process(0)
    if "shared" in repr(act.__code__.co_names):
        with pytest.raises(ProcessesError, match="process 1 did not come"):
            BOTH.check_alike("trace", {})
    else:
        BOTH.shared("trace", lambda: 1)
    as_process(1)
    with pytest.raises(ProcessesError, match="process 0 is about to trace, process 1 to search"):
        act()


def test_what_all_have_read_is_deleted_and_only_the_first_process_remembers_it(
    store: _Store, as_process: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
):
    for _ in range(3):
        as_process(0)
        _save("plan", [])
        BOTH.shared("search", lambda: 1)
        as_process(1)
        _save("plan", [])
        assert BOTH.shared("search", lambda: 2) == 1
    assert Rendezvous._old == {}
    as_process(0)
    before = len(store.values)
    monkeypatch.setattr(Rendezvous, "get", lambda *_, **__: b"{}")  # the other process agrees
    BOTH.check_alike("end", {})
    assert len(store.values) < before
    assert len({key.split("/")[1] for key in store.values}) == 1
    assert [len(places) for places in Rendezvous._old.values()] == [1]


def test_the_client_of_the_service_is_where_it_is_looked_for():
    assert rendezvous.service_client() is None, f"JAX {jax.__version__} has its coordination service elsewhere"


def test_a_version_of_jax_without_the_service_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(multihost_utils, "distributed")
    with pytest.raises(ProcessesError, match=f"JAX {jax.__version__} has another coordination service"):
        BOTH.check_alike("search", {})


def test_a_client_without_a_method_is_named_by_the_version_of_jax(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_state(), "client", object())
    with pytest.raises(ProcessesError, match=f"JAX {jax.__version__} has another coordination service"):
        BOTH.check_alike("search", {})
