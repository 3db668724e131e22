"""The experiment on shapes of the mesh: usual meshes, rows that are kept, and its table."""

import json

import pytest

from experiments import mesh_shapes


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (8, {"8": (8,), "2x4": (2, 4)}),
        (16, {"16": (16,), "2x8": (2, 8)}),
        (32, {"32": (32,), "2x16": (2, 16), "4x8": (4, 8)}),
    ],
)
def test_usual_meshes_have_all_devices(devices, expected):
    assert mesh_shapes.usual_meshes(devices) == expected


def test_the_found_shape_is_at_least_as_fast_as_the_usual_meshes(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    words = ["--models", "mlp", "--devices", "4", "--sizes", "small", "-o", str(output)]
    assert mesh_shapes.main(words) == 0
    (row,) = [mesh_shapes.Row(**json.loads(line)) for line in output.read_text().splitlines()]
    assert set(row.usual) == {"4", "2x2"}
    assert row.over_usual <= 1 + 1e-4
    assert {tuple(axes.values()) for axes, *_ in row.shapes} == {(4,), (2, 2)}
    table = capsys.readouterr().out
    assert "found shape" in table
    assert mesh_shapes.main(words) == 0  # the row is there
    assert len(output.read_text().splitlines()) == 1
