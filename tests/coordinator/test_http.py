"""The status endpoint over a real socket: its schema, metrics and health, and that hostile readers change nothing."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from coordinator import http
from coordinator.http import SECURITY_HEADERS, make_app
from coordinator.page_client import http_get
from coordinator.report import StatusReport
from tests.coordinator.office import DEADLINE_S, SECRET, Office

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def client(office: Office) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=office.coordinator.addresses["status"], timeout=DEADLINE_S) as opened:
        yield opened


async def said(office: Office, data: bytes) -> bytes:
    """What comes back for raw bytes, until the other side closes."""
    host, _, port = office.coordinator.addresses["status"].removeprefix("http://").rstrip("/").rpartition(":")
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        if not data:
            writer.write_eof()
        try:
            return await reader.read()
        except ConnectionResetError:  # closed before it had read all
            return b""
        finally:
            writer.close()


async def test_the_status_has_its_schema_and_tells_the_run(office: Office, client: httpx.AsyncClient) -> None:
    trainer, rollout = await office.swarm()
    await trainer.make_version(rollout)
    answer = await client.get("/api/v1/status")
    status = answer.json()
    assert (answer.status_code, status["schema"]) == (200, 1)
    report = StatusReport.model_validate(status)
    assert json.loads(report.model_dump_json()) == status
    assert (report.version, report.num_accepted, report.run.name) == (1, 4, "test")
    assert {(node.peer_id, node.role, node.state, node.name) for node in report.nodes} == {
        (trainer.identity.peer_id, "trainer", "live", "fox"),
        (rollout.identity.peer_id, "rollout", "live", "fox"),
    }
    assert report.history[0].metrics["loss"] == 1.0
    books = report.books
    assert books.issued == books.trained == 4
    assert json.loads(await http_get(office.coordinator.addresses["status"] + "api/v1/status"))["schema"] == 1


async def test_no_secret_is_in_any_output(office: Office, client: httpx.AsyncClient) -> None:
    await office.swarm()
    home = office.home
    secrets = [SECRET, home.run_secret, home.identity.seed, home.seed_secret(office.head[0])]
    for path in ("/", "/api/v1/status", "/metrics", "/healthz", "/readyz", "/openapi.json"):
        content = (await client.get(path)).content
        for secret in secrets:
            assert secret not in content
            assert secret.hex().encode() not in content
        assert str(home.path).encode() not in content


async def test_the_metrics_parse_and_have_a_bounded_number_of_series(office: Office, client: httpx.AsyncClient) -> None:
    trainer, rollout = await office.swarm()
    await trainer.make_version(rollout)
    office.coordinator.authority.refusals["NO_WORK"] += 3
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert all(name.startswith("hexcomb_") for name in families)
    samples = [sample for family in families.values() for sample in family.samples]
    names = {node.identity.peer_id for node in (trainer, rollout)} | {"fox"}
    assert not names & {value for sample in samples for value in sample.labels.values()}
    assert not any(name in answer.text for name in names)
    assert families["hexcomb_version_head"].samples[0].value == 1
    nodes = {(s.labels["role"], s.labels["state"]): s.value for s in families["hexcomb_nodes"].samples}
    assert nodes[("trainer", "live")] == nodes[("rollout", "live")] == 1
    assert {s.labels["code"]: s.value for s in families["hexcomb_refusals"].samples}["NO_WORK"] >= 3
    lags = {s.labels.get("le"): s.value for s in families["hexcomb_token_lag_versions"].samples}
    assert (lags["0.0"], lags["1.0"], lags["+Inf"]) == (12, 12, 12)
    before = len(samples)
    for _ in range(3):
        await office.join()
    assert len(re.findall(r"^hexcomb_", (await client.get("/metrics")).text, re.M)) == before


async def test_a_coordinator_is_alive_before_it_is_ready(office: Office, client: httpx.AsyncClient) -> None:
    assert ((await client.get("/healthz")).text, (await client.get("/readyz")).status_code) == ("ok\n", 200)
    office.coordinator.ready = "the coordinator is starting\n"
    answer = await client.get("/readyz")
    assert (answer.status_code, answer.text) == (503, "the coordinator is starting\n")
    assert (await client.get("/healthz")).status_code == 200
    office.coordinator.ready = ""
    assert (await client.get("/readyz")).text == "ok\n"


async def test_every_answer_has_the_security_headers(client: httpx.AsyncClient) -> None:
    for path in ("/", "/api/v1/status", "/metrics", "/healthz", "/openapi.json", "/nowhere", "/docs"):
        answer = await client.get(path)
        assert {name: answer.headers.get(name) for name in SECURITY_HEADERS} == SECURITY_HEADERS
        assert "server" not in answer.headers
        assert answer.status_code == (404 if path in ("/nowhere", "/docs") else 200)


async def test_the_page_needs_nothing_from_elsewhere_and_writes_text_only(client: httpx.AsyncClient) -> None:
    page = (await client.get("/")).text
    assert page.startswith("<!doctype html>")
    links = re.findall(r"""(?:src|href|action)\s*=\s*["']?([^"'\s>]*)""", page)
    assert links
    assert all(link.startswith("/") for link in links)
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page) == []
    dangerous = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc")
    assert [word for word in dangerous if word in page] == []
    assert "textContent" in page


async def test_the_endpoint_is_for_reading(office: Office, client: httpx.AsyncClient) -> None:
    before = office.state()
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/", "/api/v1/status", "/metrics"):
            assert (await client.request(method, path, content=b"x" * 100)).status_code == 405
    assert office.state() == before
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert {verb for operations in paths.values() for verb in operations} == {"get"}


HOSTILE: dict[str, tuple[bytes, bytes]] = {
    "dots": (b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"404"),
    "escaped dots": (b"GET /%2e%2e/%2e%2e/identity.key HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"404"),
    "double slash": (b"GET //etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"404"),
    "huge header": (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", b""),
    "NUL": (b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), b"400"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b""),
    "nothing": (b"", b""),
}


async def test_hostile_requests_are_refused_and_the_next_reader_is_served(
    office: Office, client: httpx.AsyncClient
) -> None:
    for name, (request, status) in HOSTILE.items():
        answer = await said(office, request)
        assert status in answer.partition(b"\r\n")[0], name
        assert b"root:" not in answer
        assert b"hexcomb-key" not in answer
        assert (await client.get("/healthz")).status_code == 200


async def test_too_many_readers_are_told_to_come_back_and_nodes_are_served(
    office: Office, client: httpx.AsyncClient
) -> None:
    member = await office.join()
    assert (await client.get("/healthz")).status_code == 200
    host, _, port = office.coordinator.addresses["status"].removeprefix("http://").rstrip("/").rpartition(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(http.MAX_CONNECTIONS + 10)]
    try:
        assert (await client.get("/healthz")).status_code == 503
        assert (await member.control.get_manifest(None)).manifest
    finally:
        for _, writer in idle:
            writer.close()
    async with asyncio.timeout(DEADLINE_S):
        while (await client.get("/healthz")).status_code != 200:  # noqa: ASYNC110 - closed when the loop sees it
            await asyncio.sleep(0.05)


async def test_a_report_that_takes_long_is_told_for_a_moment() -> None:
    now_s, took_s, num_made = 0.0, 0.0, 0

    class Report:
        def model_dump_json(self) -> str:
            nonlocal now_s, num_made
            now_s += took_s
            num_made += 1
            return f"[{num_made}]"

    made: Any = Report
    rendered = http.Rendered(made, clock=lambda: now_s)
    for takes_s, kept_s in ((0.001, 0.03), (0.2, 3.0)):
        took_s = takes_s
        first = rendered.body()
        now_s += kept_s * 0.9
        assert rendered.body() == first
        now_s += kept_s * 0.2
        assert rendered.body() != first
        now_s += 5.0


async def test_a_report_with_numbers_that_json_lacks_is_still_json(office: Office) -> None:
    report = StatusReport.model_validate(
        json.loads(await http_get(office.coordinator.addresses["status"] + "api/v1/status"))
    )
    report.tokens_per_s = float("nan")
    app = make_app(report=lambda: report, ready=lambda: "")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/api/v1/status")).json()["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", ValueError),
        (b"HTTP/1.1 503 No\r\n\r\nlater", ValueError),
        (b"220 mail.example ESMTP\r\n", ValueError),
        (b"\xff\xfe\r\n\r\n", ValueError),
    ],
)
async def test_the_client_takes_only_a_good_answer(answer: bytes, kind: type[Exception]) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(kind):
            await http_get(f"http://127.0.0.1:{port}/x")
    for url in ("", "api/v1/status", "https://127.0.0.1:1/", "http://nohost/", "http://127.0.0.1:x/"):
        with pytest.raises(ValueError):  # noqa: PT011 - whatever its words
            await http_get(url)
    with pytest.raises(ConnectionRefusedError):
        await http_get(f"http://127.0.0.1:{port}/x", deadline_s=2)
