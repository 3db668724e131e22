"""Prices of all strategies of a table: those of a kind differ in devices only, so that each kind is priced once.

Letters for sizes: S strategies, D devices, K kinds, H different hardware.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from search_spaces.embedding_tables.base import EmbeddingTable, TableDevices
from search_spaces.embedding_tables.prices import Price, prices_of
from search_spaces.embedding_tables.strategies import StrategyKind


def strategy_prices(table: EmbeddingTable, kinds: Sequence[StrategyKind], devices: TableDevices) -> Price:
    """Computes what each strategy of a table costs each device, a price of arrays `[S, D]`."""
    all_hardware = list(dict.fromkeys(devices.hardware))
    hardware_of = np.array([all_hardware.index(hardware) for hardware in devices.hardware])
    pieces = [kind.pieces for kind in kinds]
    alike = [dataclasses.replace(devices, hardware=(h,) * devices.num_devices) for h in all_hardware]
    by_hardware = [prices_of(table, pieces, one) for one in alike]
    return Price(
        *(
            np.concatenate([_spread(prices[:, k], kind.groups, hardware_of) for k, kind in enumerate(kinds)])
            for prices in map(np.stack, zip(*by_hardware, strict=True))
        )
    )


def _spread(prices: np.ndarray, groups: np.ndarray, hardware_of: np.ndarray) -> np.ndarray:
    """Returns what each device pays, `[G, D]`, from what each index of a group pays, `[H, D]`.

    A device that is in no group pays what the last index does; where groups have all devices, there is none.
    """
    spread = np.repeat(prices[hardware_of, -1][None], len(groups), axis=0)
    np.put_along_axis(spread, groups, prices[hardware_of[groups], np.arange(groups.shape[1])], axis=1)
    return spread
