"""TLS 1.2 is refused in every process that imports hexcomb before gRPC, which reads its ciphers once."""

import subprocess
import sys
from pathlib import Path

import pytest

TLS_PROBE = """
import asyncio, ssl, socket, sys, time
{first}
from protocol import TLS_13_ONLY
from protocol.certificates import anchor_pem, self_issued_leaf, server_name
from protocol.keys import Identity
from protocol.tls import ServedLeaf, join_server_credentials
import grpc.aio

async def main():
    me = Identity.from_seed(bytes([3]) * 32)
    server = grpc.aio.server()
    leaf = self_issued_leaf(me, now_ms=time.time_ns() // 1_000_000)
    port = server.add_secure_port("127.0.0.1:0", join_server_credentials(ServedLeaf(leaf)))
    await server.start()

    def handshake(version):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = context.maximum_version = version
        context.load_verify_locations(cadata=anchor_pem(me.public_bytes).decode())
        context.set_alpn_protocols(["h2"])
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as raw:
                return context.wrap_socket(raw, server_hostname=server_name(me.peer_id)).version()
        except OSError:
            return "refused"

    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        print(await asyncio.to_thread(handshake, version), end=" ")
    print(TLS_13_ONLY)
    await server.stop(0)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("", "refused TLSv1.3 True"),
        ("import node, grpc", "refused TLSv1.3 True"),
        ("import coordinator, grpc", "refused TLSv1.3 True"),
        ("import grpc", "TLSv1.2 TLSv1.3 False"),
    ],
    ids=["protocol first", "node first", "coordinator first", "gRPC first: the control"],
)
def test_tls_1_2_is_refused_where_protocol_is_imported_before_grpc(
    first: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_SSL_CIPHER_SUITES", raising=False)
    root = Path(__file__).parents[2]
    probe = [sys.executable, "-c", TLS_PROBE.format(first=first)]
    done = subprocess.run(probe, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == expected
