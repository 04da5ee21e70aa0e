"""The cheapest place to cut a region of the graph: minimum cut by maximum flow (no JAX here).

SciPy's `maximum_flow` is not used: its capacities are 32-bit integers, and buffers have more bytes.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Hashable

__all__ = ["FOREVER", "Network"]

FOREVER = 1 << 62
"""The capacity of an edge that must not be cut."""


class Network:
    """Directed edges with capacities, from "source" to "sink"."""

    def __init__(self):
        self._residual: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)

    def add_edge(self, start: Hashable, end: Hashable, capacity: int) -> None:
        edges = self._residual[start]
        edges[end] = min(FOREVER, edges.get(end, 0) + capacity)
        self._residual[end].setdefault(start, 0)

    def minimum_cut(self, source: Hashable, sink: Hashable) -> tuple[int, set[Hashable]]:
        """The bytes of the cheapest cut, and what lies on the source's side of it.

        Of all the cheapest cuts it is the one nearest to the source. A cut of `FOREVER` or more
        bytes means that there is none.
        """
        flow = 0
        while True:
            came_from = self._reach(source, sink)
            if sink not in came_from:
                return flow, set(came_from)
            path = [sink]
            while path[-1] != source:
                path.append(came_from[path[-1]])
            path.reverse()
            steps = list(itertools.pairwise(path))
            pushed = min(self._residual[a][b] for a, b in steps)
            flow += pushed
            if flow >= FOREVER:
                return flow, set()
            for a, b in steps:
                self._residual[a][b] -= pushed
                self._residual[b][a] += pushed

    def _reach(self, source: Hashable, sink: Hashable) -> dict[Hashable, Hashable]:
        """What a breadth-first search reaches over edges with capacity left, and from where."""
        came_from: dict[Hashable, Hashable] = {source: source}
        todo = deque([source])
        while todo and sink not in came_from:
            here = todo.popleft()
            for there, capacity in self._residual[here].items():
                if capacity > 0 and there not in came_from:
                    came_from[there] = here
                    todo.append(there)
        return came_from
