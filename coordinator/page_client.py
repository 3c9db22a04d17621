"""Reading the status endpoint with nothing but the standard library. Impure: one connection a call."""

import asyncio


async def http_get(url: str, *, deadline_s: float = 5.0) -> str:
    """The body of an answer with status 200. Raises `OSError`, `ValueError`, `TimeoutError`."""
    if not url.startswith("http://"):
        raise ValueError(f"{url!r} is no address of a page")
    host, _, path = url.removeprefix("http://").partition("/")
    name, _, port = host.rpartition(":")
    async with asyncio.timeout(deadline_s):
        reader, writer = await asyncio.open_connection(name, int(port))
        try:
            writer.write(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        finally:
            writer.close()
    status = head.partition("\r\n")[0]
    if " 200 " not in status:
        raise ValueError(f"{url} answered {status[:80]!a}")
    return body
