"""The layers of a chain are those of the model."""

import numpy as np

from diffshard.pipelines.cutting import uncut_step
from diffshard.pipelines.layer_chain import layer_chain
from diffshard.pipelines.microbatches import BatchArguments
from tests.diffshard.pipelines.scanned_models import LAYERS, WIDTH, arguments, train_step


def test_each_trip_of_a_scan_over_layers_is_a_layer():
    chain = layer_chain(uncut_step(train_step, 4, BatchArguments((1,), ()), arguments(), {}), 64)
    trips = [layer for layer, cut in enumerate(chain.cuts, 1) if cut.trip]
    assert [chain.cuts[layer - 1].trip for layer in trips] == list(range(1, LAYERS))
    assert len({chain.signatures[layer] for layer in trips[:-1]}) == 1  # the last may end with other equations
    np.testing.assert_array_equal(chain.returned_bytes[trips], 4 * 6 * WIDTH * 4)  # the gradient of what goes there
    np.testing.assert_array_equal(chain.returned_bytes[trips], chain.sent_bytes[trips])
    weights = 2 * WIDTH * 2 * WIDTH + WIDTH
    np.testing.assert_array_equal(chain.state_bytes[trips[:-1]], 3 * 4 * weights)  # with two moments
