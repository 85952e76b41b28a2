"""Maximum flow and minimum cut of a directed graph with integer capacities (Dinic's algorithm).

Graphs of a thousand nodes take milliseconds here; a general graph library takes a good part of a second for them.
"""
from __future__ import annotations

from collections import deque

INFINITE = 1 << 60


class FlowNetwork:
    """Nodes are ints from 0; `edge` adds one with its capacity."""

    def __init__(self, nodes: int) -> None:
        self.heads: list[int] = []
        self.capacity: list[int] = []
        self.edges: list[list[int]] = [[] for _ in range(nodes)]

    def edge(self, tail: int, head: int, capacity: int) -> None:
        self.edges[tail].append(len(self.heads))
        self.heads.append(head)
        self.capacity.append(capacity)
        self.edges[head].append(len(self.heads))
        self.heads.append(tail)
        self.capacity.append(0)

    def minimum_cut(self, source: int, sink: int) -> tuple[int, list[bool]]:
        """(total capacity of a minimum cut, for each node whether it can be moved to the source's side: the cut nearest the sink).

        The value is INFINITE or more if no finite cut exists.
        """
        total = 0
        while (levels := self._levels(source, sink))[sink] >= 0:
            following = [0] * len(self.edges)
            while pushed := self._push(source, sink, levels, following):
                total += pushed
                if total >= INFINITE:
                    return total, [False] * len(self.edges)
        return total, self._not_reaching(sink)

    def _levels(self, source: int, sink: int) -> list[int]:
        levels = [-1] * len(self.edges)
        levels[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for e in self.edges[node]:
                head = self.heads[e]
                if self.capacity[e] and levels[head] < 0:
                    levels[head] = levels[node] + 1
                    queue.append(head)
        return levels

    def _push(self, source: int, sink: int, levels: list[int], following: list[int]) -> int:
        """One augmenting path in the level graph; 0 if there is none left."""
        path: list[int] = []
        node = source
        while node != sink:
            edges, at = self.edges[node], following[node]
            while at < len(edges):
                e = edges[at]
                if self.capacity[e] and levels[self.heads[e]] == levels[node] + 1:
                    break
                at += 1
            following[node] = at
            if at < len(edges):
                path.append(edges[at])
                node = self.heads[edges[at]]
                continue
            if not path:
                return 0
            node = self.heads[path.pop() ^ 1]                # a dead end: go back, take the next edge
            following[node] += 1
        amount = min(self.capacity[e] for e in path)
        for e in path:
            self.capacity[e] -= amount
            self.capacity[e ^ 1] += amount
        return amount

    def _not_reaching(self, sink: int) -> list[bool]:
        """For each node, True if no path with capacity left leads from it to the sink."""
        reaches = [False] * len(self.edges)
        reaches[sink] = True
        queue = deque([sink])
        while queue:
            node = queue.popleft()
            for e in self.edges[node]:
                tail = self.heads[e]
                if self.capacity[e ^ 1] and not reaches[tail]:
                    reaches[tail] = True
                    queue.append(tail)
        return [not r for r in reaches]
