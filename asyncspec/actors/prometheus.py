"""Serves a run's metrics to Prometheus, from the controller's process: `logging.prometheus`.

A metric `lag/max` of metrics.jsonl is the gauge asyncspec_lag_max, with the value of the last step. Those of one actor
have a label: asyncspec_actors_busy{actor="generator0"}.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from asyncspec.ledger.status import Status

_ACTOR = r"[a-z_]+[0-9]*(?:_rank[0-9]+)?(?:\.[0-9]+)?"
_OF_ACTOR = re.compile(rf"(actors|process|wire|clock|environment|reward)/({_ACTOR})_(\w+)")


class Endpoint:
    """An HTTP server in threads of its own."""

    def __init__(self, address: str, row: Callable[[], Mapping], status: Callable[[], Status | None]) -> None:
        """
        Args:
            address: HOST:PORT; port 0 is a free one.
            row: returns the last row of metrics, perhaps an empty one.
            status: returns the newest status of the run; None: there is none yet.

        Raises:
            OSError: the address cannot be used.
        """
        from prometheus_client import CollectorRegistry, start_http_server

        host, _, port = address.rpartition(":")
        self._row, self._status = row, status
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        self.port = self._server.server_port

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; prometheus_client calls it."""
        from prometheus_client.core import GaugeMetricFamily

        of_actors: dict[str, GaugeMetricFamily] = {}
        for name, value in dict(self._row()).items():
            if not isinstance(value, int | float):
                continue
            if found := _OF_ACTOR.fullmatch(name):
                gauge = f"asyncspec_{found[1]}_{found[3]}"
                made = GaugeMetricFamily(gauge, f"{found[1]}/ACTOR_{found[3]}", labels=["actor"])
                family = of_actors.setdefault(gauge, made)
                family.add_metric([found[2]], value)
            else:
                yield GaugeMetricFamily("asyncspec_" + re.sub(r"\W", "_", name), name, value)
        yield from of_actors.values()
        if (status := self._status()) is None:
            return
        up = GaugeMetricFamily("asyncspec_up", "actors that are ready", labels=["role"])
        for role, count in status.up.items():
            up.add_metric([role], count)
        yield up
        for name, value in (
            ("steps", status.steps),
            ("steps_trained", status.step),
            ("published_version", status.version),
            ("not_ready", len(status.others) + status.more),
            ("tickets_waiting", status.waiting),
            ("tickets_generating", status.generating),
            ("tickets_generated", status.generated),
            ("left_seconds", status.left_s),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"asyncspec_{name}", name.replace("_", " "), value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
