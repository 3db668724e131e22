"""Parts of a cluster on which a pipeline is searched alone, so that more devices do not lead to a slower one.

A part is the number of devices of each kind, as many as fill hosts.
"""

from collections.abc import Iterator

from cost.clusters import Cluster

_MOST_HOSTS = 4
"""Of more hosts of a kind than these, only powers of two are parts."""


def kinds_alone(cluster: Cluster) -> list[tuple[int, ...]]:
    """Returns all devices of each kind; nothing where there is one kind only."""
    kinds = cluster.kinds if len(cluster.kinds) > 1 else ()
    return [_only(cluster, kind, hosts.num_devices) for kind, hosts in enumerate(kinds)]


def fewer_hosts(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Yields the devices of fewer hosts of each kind than there are, from more to fewer."""
    for kind, hosts in enumerate(cluster.kinds):
        for count in range(hosts.count - 1, 0, -1):
            if hosts.count <= _MOST_HOSTS or count & (count - 1) == 0:
                yield _only(cluster, kind, count * hosts.devices)


def _only(cluster: Cluster, kind: int, count: int) -> tuple[int, ...]:
    return tuple(count if k == kind else 0 for k in range(len(cluster.kinds)))
