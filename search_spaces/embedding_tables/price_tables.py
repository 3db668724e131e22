"""Prices of all strategies of a table: where devices are alike, those that differ in devices only are priced once.

A table has hundreds of strategies but a few dozen kinds of them; most prices are permutations of others.
"""

from collections.abc import Sequence

import numpy as np

from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, TableDevices
from search_spaces.embedding_tables.prices import Price, price_of
from search_spaces.embedding_tables.strategies import TableStrategy


def strategy_prices(table: EmbeddingTable, strategies: Sequence[TableStrategy], devices: TableDevices) -> Price:
    """Computes what each strategy of a table costs each device, a price of arrays `[S, D]`."""
    if len(set(devices.hardware)) > 1:
        rows = [price_of(table, strategy.pieces, devices) for strategy in strategies]
        return Price(*map(np.array, zip(*rows, strict=True)))
    kinds: dict[tuple, int] = {}
    prices: list[Price] = []
    kind_of, rank = [], np.empty((len(strategies), devices.num_devices), np.int64)
    for i, strategy in enumerate(strategies):
        used = list(dict.fromkeys(p.device for p in strategy.pieces if p.device != EVERY_DEVICE))
        order = [*used, *(d for d in range(devices.num_devices) if d not in used)]
        rank[i, order] = range(len(order))
        rank_of = {EVERY_DEVICE: EVERY_DEVICE, **{device: r for r, device in enumerate(used)}}
        ranked = tuple(piece._replace(device=rank_of[piece.device]) for piece in strategy.pieces)
        if ranked not in kinds:
            kinds[ranked] = len(prices)
            prices.append(price_of(table, ranked, devices))
        kind_of.append(kinds[ranked])
    tables = [np.array(part) for part in zip(*prices, strict=True)]
    return Price(*(np.take_along_axis(part[kind_of], rank, axis=1) for part in tables))
