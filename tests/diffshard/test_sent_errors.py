"""Errors come back from another process with their own types, where these are known, and as texts else."""

import json

import pytest

from diffshard.base import InfeasibleError, PlanError, ProcessesError
from diffshard.elastic.ownership import InUseError
from diffshard.pipelines.stage_search import StageMemoryError
from diffshard.processes import error_of, packed_error


class UnknownError(Exception):
    """An error of the user's program."""


def sent(error: BaseException) -> Exception:
    return error_of(json.loads(json.dumps(packed_error(error))), 3)


@pytest.mark.parametrize(
    "error",
    [ValueError("a", 1), KeyError("b"), PlanError("no"), InfeasibleError("no"), InUseError("taken"),
     ProcessesError("c"), OSError(28, "No space left on device"), FileNotFoundError(2, "No such file", "/x")],
    ids=repr,
)  # fmt: skip
def test_known_errors_keep_their_types_and_texts(error):
    found = sent(error)
    assert type(found) is type(error)
    assert (str(found), found.args) == (str(error), error.args)
    assert found.__notes__ == ["This error is that of process 3."]


def test_what_errors_have_beside_their_texts_is_kept():
    found = sent(StageMemoryError("no stage fits", is_proven=True))
    assert isinstance(found, StageMemoryError)
    assert found.is_proven


@pytest.mark.parametrize(
    "error", [UnknownError("own"), ValueError(object), KeyboardInterrupt("stop"), ValueError(b"x")]
)
def test_of_other_errors_the_text_is_told(error):
    found = sent(error)
    assert type(found) is ProcessesError
    assert str(found) == f"Process 3 failed with {type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("module", "name"),
    [("builtins", "eval"), ("builtins", "SystemExit"), ("os", "system"), ("builtins.x", "y"),
     ("diffshard.base", "Path"), ("diffshard.nowhere", "Error"), ("subprocess", "CalledProcessError"), ("", "")],
)  # fmt: skip
def test_nothing_but_a_known_error_is_made(module, name):
    packed = {"text": "an error", "module": module, "name": name, "arguments": ["true"], "fields": {}}
    assert type(error_of(packed, 3)) is ProcessesError
