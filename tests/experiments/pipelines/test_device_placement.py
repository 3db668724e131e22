"""The benchmark of device placement: the published loads, and what happens without its files."""

import json

import numpy as np
import pytest

from experiments.pipelines import device_placement
from tests.experiments.printed_tables import printed_rows


@pytest.mark.skipif(not device_placement.GRAPHS.exists(), reason="the graphs of the benchmark are not here")
def test_the_published_loads_to_all_their_digits(capsys):
    device_placement.main([])
    rows = printed_rows(capsys.readouterr().out)
    assert [row[0] for row in rows] == list(device_placement.PUBLISHED)
    assert all(row[3] == row[4] for row in rows)


def test_missing_graphs_are_skipped_and_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(device_placement, "GRAPHS", tmp_path)
    device_placement.main([])
    assert f"Skipped: {tmp_path} lacks bert24_inference, bert24_training, resnet50_training." in capsys.readouterr().out


def test_a_forward_layer_and_its_backward_layer_are_one(tmp_path):
    def node(number, color, is_backward):
        return {
            "id": number, "colorClass": color, "isBackwardNode": is_backward, "supportedOnFpga": color != 9,
            "cpuLatency": 10.0 * number, "fpgaLatency": float(number), "size": 1.0,
        }  # fmt: skip

    nodes = [node(1, 7, 0), node(2, 9, 0), node(3, 7, 1), node(4, 9, 1)]
    edges = [{"sourceId": 1, "destId": 2, "cost": 5.0}, {"sourceId": 4, "destId": 3, "cost": 6.0}]
    data = {"maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 8.0, "nodes": nodes, "edges": edges}
    (tmp_path / "graph.json").write_text(json.dumps(data))
    graph, devices, memory = device_placement.read(tmp_path / "graph.json")
    assert (devices, memory) == ((2, 1), (8.0, np.inf))
    assert graph.edges.tolist() == [[0, 1]]
    assert graph.layer_s.tolist() == [[4.0, 40.0], [np.inf, 60.0]]
    assert graph.layer_bytes.tolist() == [2.0, 2.0]
    assert graph.sends == [[(5.0, frozenset({1}))], [(6.0, frozenset({0}))]]
