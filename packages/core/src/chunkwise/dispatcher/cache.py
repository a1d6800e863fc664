"""The bounded dictionary from call keys to routes."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chunkwise.dispatcher.route import Route


class RouteCache(dict[Hashable, "Route"]):
    """A dict that drops its oldest entries when it is full; reading it is a plain ``dict.get``."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self._lock = threading.Lock()

    def put(self, key: Hashable, route: Route) -> None:
        """Keep a route; of a full cache the oldest quarter goes."""
        with self._lock:
            if len(self) >= self.limit:
                for old in list(self)[: max(1, self.limit // 4)]:
                    self.pop(old, None)
            self[key] = route


ROUTES = RouteCache(limit=4096)
