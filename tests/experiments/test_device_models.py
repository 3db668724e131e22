"""Data and models as every device computes them: the numbers of one device on many, and they learn."""

import numpy as np
import pytest

from experiments.models import text


def test_the_longer_text_is_the_language_reference():
    tokens = text.load("python_reference")
    assert tokens.dtype == np.int32
    assert len(tokens) > 400_000
    assert 'The "assert" statement' in text.decode(tokens)
    assert "�" not in text.decode(tokens)
    np.testing.assert_array_equal(text.load(), text.load("alice"))
    with pytest.raises(ValueError, match="`name` must be one of .* not 'bob'"):
        text.load("bob")  # type: ignore[arg-type]
