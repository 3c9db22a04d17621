"""The status endpoint: page, JSON, metrics and health, read-only. Impure: serves HTTP.

Everything is computed from the report when it is asked for; nothing counts on the side. A report that takes long to
make is told again for a moment, so that readers, however many, take little of the process's time. No peer id is a
metric's label, so the number of series does not grow with the number of nodes.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from importlib import resources

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.report import StatusReport

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
MAX_CONNECTIONS = 256
"""More are told to come back later, so that the page's readers leave files to the nodes."""

MAX_KEPT_S = 3.0
KEPT_PER_MADE = 30
"""A report is told for so many times the time that it took to make."""


class Rendered:
    """The report as JSON."""

    def __init__(self, report: Callable[[], StatusReport], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._body, self._until_s = b"", float("-inf")

    def body(self) -> bytes:
        """As it is now, or was a moment ago."""
        started_s = self._clock()
        if started_s >= self._until_s:
            self._body = self._report().model_dump_json().encode()
            ended_s = self._clock()
            self._until_s = ended_s + min(MAX_KEPT_S, KEPT_PER_MADE * (ended_s - started_s))
        return self._body


class Metrics(Collector):
    """The report as Prometheus families, made at scrape."""

    def __init__(self, report: Callable[[], StatusReport]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """One family for each figure."""
        report = self._report()
        yield GaugeMetricFamily("hexcomb_version_head", "Newest committed version.", report.version)
        yield GaugeMetricFamily("hexcomb_tokens_per_second", "Tokens sampled per second now.", report.tokens_per_s)
        nodes = GaugeMetricFamily("hexcomb_nodes", "Nodes by role and state.", labels=["role", "state"])
        for role in ("trainer", "rollout", "idle"):
            for state in ("live", "lost"):
                number = sum(node.role == role and node.state == state for node in report.nodes)
                nodes.add_metric([role, state], number)
        yield nodes
        slots = GaugeMetricFamily("hexcomb_slots", "Slots by where they stand.", labels=["state"])
        for name, number in report.books.model_dump().items():
            slots.add_metric([name], number)
        yield slots
        leases = GaugeMetricFamily("hexcomb_leased_slots", "Leased slots by outcome.", labels=["state"])
        for name, number in report.leases.model_dump().items():
            leases.add_metric([name], number)
        yield leases
        yield CounterMetricFamily("hexcomb_rollouts_accepted", "Rollouts accepted.", report.num_accepted)
        yield CounterMetricFamily("hexcomb_versions_diverged", "Rounds whose trainers differed.", report.num_diverged)
        yield CounterMetricFamily("hexcomb_masked_tokens", "Tokens too old to train on.", report.num_masked_tokens)
        yield CounterMetricFamily("hexcomb_moved_slots", "Slots that a faster node took over.", report.num_moved_slots)
        rewards = GaugeMetricFamily("hexcomb_pool_reward", "Mean reward of a curriculum's pools.", labels=["pool"])
        shares = GaugeMetricFamily("hexcomb_pool_share", "Share of the next groups, by pool.", labels=["pool"])
        for pool in report.pools:
            shares.add_metric([pool.name], pool.share)
            if pool.mean_reward is not None:
                rewards.add_metric([pool.name], pool.mean_reward)
        yield from (rewards, shares)
        refusals = CounterMetricFamily("hexcomb_refusals", "Requests refused, by code.", labels=["code"])
        for code, number in sorted(report.refusals.items()):
            refusals.add_metric([code], number)
        yield refusals
        yield self._lags(report)

    @staticmethod
    def _lags(report: StatusReport) -> Metric:
        family = HistogramMetricFamily("hexcomb_token_lag_versions", "Lag of trained tokens, in versions.")
        total, weighted, buckets = 0, 0, []
        for lag in range(report.run.max_lag + 1):
            total += report.lag_histogram.get(lag, 0)
            weighted += lag * report.lag_histogram.get(lag, 0)
            buckets.append((str(float(lag)), float(total)))
        family.add_metric([], [*buckets, ("+Inf", float(total))], weighted)
        return family


def make_app(*, report: Callable[[], StatusReport], ready: Callable[[], str]) -> FastAPI:
    """The application. `ready` says in a sentence what is not ready yet, or nothing."""
    app = FastAPI(title="hexcomb coordinator", version="1", docs_url=None, redoc_url=None)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Metrics(report))
    rendered = Rendered(report)
    page = resources.files("coordinator").joinpath("page/index.html").read_text()

    @app.middleware("http")
    async def secure(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await answer(request)
        response.headers.update(SECURITY_HEADERS)
        return response

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def index() -> str:
        return page

    @app.get("/api/v1/status", response_model=StatusReport)
    async def status() -> Response:
        """The whole state of the run."""
        return Response(rendered.body(), media_type="application/json")

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The same figures for Prometheus."""
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """Whether the process is alive."""
        return "ok\n"

    @app.get("/readyz", response_class=PlainTextResponse)
    async def readyz() -> PlainTextResponse:
        """Whether nodes can join and work."""
        missing = ready()
        return PlainTextResponse(missing or "ok\n", status_code=503 if missing else 200)

    return app


class QuietServer(uvicorn.Server):
    """uvicorn inside another program's loop: signals belong to that program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves them alone."""
        yield


async def serve_http(app: FastAPI, bound: socket.socket) -> None:
    """Serves on a socket that is bound already until cancelled, then ends its connections and closes it."""
    config = uvicorn.Config(
        app,
        log_level="error",  # strangers cause warnings at will
        access_log=False,
        http="h11",  # bounds the headers, and needs nothing compiled
        ws="none",
        lifespan="off",
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=2,
    )
    server = QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await serving
