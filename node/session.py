"""The session: one stream to the coordinator for as long as the node lives. Impure: gRPC.

Hello and heartbeats go up, orders come down. When the stream breaks it is opened again, elsewhere if the
coordinator has several addresses, after a jittered wait. Invariant: orders are delivered one at a time and
in order; one that this program does not understand is logged and passed over.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from node.backoff import backoff_s
from node.control import ControlClient
from node.orders import Order, Welcome, order_of
from protocol.errors import HexcombError, UnreachableError
from protocol.grpc_errors import from_rpc_error
from protocol.v1 import control_pb2

WELCOME_DEADLINE_S = 20.0
WRITE_DEADLINE_S = 20.0
DEFAULT_HEARTBEAT_S = 5.0
HEALTHY_S = 10.0

log = structlog.get_logger("session")


@dataclass(slots=True)
class Link:
    """What is known of the stream now: for the status."""

    is_up: bool = False
    since_s: float = field(default_factory=time.monotonic)
    num_connects: int = 0
    num_heartbeats: int = 0
    trouble: str = ""


class Session:
    """Keeps the stream. `hello` and `heartbeat` give the message to send at that moment."""

    def __init__(
        self,
        control: ControlClient,
        *,
        hello: Callable[[], control_pb2.Hello],
        heartbeat: Callable[[], control_pb2.Heartbeat],
        deliver: Callable[[Order], Awaitable[None]],
    ) -> None:
        self._control, self._hello, self._heartbeat, self._deliver = control, hello, heartbeat, deliver
        self._heartbeat_s = DEFAULT_HEARTBEAT_S
        self._hurry = asyncio.Event()
        self._again = asyncio.Event()
        self.link = Link()

    def beat_now(self) -> None:
        """The next heartbeat goes out at once: something in it has changed."""
        self._hurry.set()

    def introduce_again(self) -> None:
        """Opens the stream anew, with a new hello: the node knows more about itself now."""
        self._again.set()

    async def run(self) -> None:
        """Until cancelled. Raises only what `deliver` raises."""
        attempt = 0
        while True:
            started_s = time.monotonic()
            try:
                await self._once()
                attempt = 0
                continue  # the node wanted a new stream
            except HexcombError as error:
                self._note_down(error)
            if time.monotonic() - started_s > HEALTHY_S:
                attempt = 0
            wait_s = backoff_s(attempt, chance=random.random())
            log.warning("no session", why=self.link.trouble, address=self._control.address, next_in_s=round(wait_s, 2))
            await asyncio.sleep(wait_s)
            attempt += 1
            await self._control.move_on()

    async def _once(self) -> None:
        """One stream, from hello to its end; returns when the node wants another one."""
        self._again.clear()
        call = self._control.stub.Session()
        again = asyncio.create_task(self._again.wait())
        reading = asyncio.create_task(self._read(call))
        writing = asyncio.create_task(self._write(call))
        try:
            done, _ = await asyncio.wait({again, reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if reading in done:
                reading.result()
            if writing in done:
                writing.result()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, doing="the session") from error
        except asyncio.InvalidStateError as error:  # grpc.aio's word for a write on a stream that has ended
            raise UnreachableError("the session ended", why=str(error)) from error
        finally:
            call.cancel()
            again.cancel()
            reading.cancel()
            writing.cancel()
            await asyncio.gather(again, reading, writing, return_exceptions=True)
            self.link.is_up = False

    async def _write(self, call: Any) -> None:
        await _within(WRITE_DEADLINE_S, call.write(control_pb2.SessionRequest(hello=self._hello())))
        while True:
            self._hurry.clear()
            message = control_pb2.SessionRequest(heartbeat=self._heartbeat())
            await _within(WRITE_DEADLINE_S, call.write(message))
            self.link.num_heartbeats += 1
            if self.link.num_heartbeats == 1:
                log.info("first heartbeat", version=message.heartbeat.version, activity=message.heartbeat.activity)
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._hurry.wait()
            except TimeoutError:
                continue

    async def _read(self, call: Any) -> None:
        message = await _within(WELCOME_DEADLINE_S, call.read())
        while message is not grpc.aio.EOF:
            await self._take(message)
            message = await call.read()
        status = await call.code()
        if status is not grpc.StatusCode.OK:
            await call  # raises what the stream ended with
        raise UnreachableError("the coordinator closed the session")

    async def _take(self, message: control_pb2.SessionResponse) -> None:
        try:
            order = order_of(message)
        except HexcombError as error:
            log.warning("order passed over", code=error.code, why=error.why)
            return
        if isinstance(order, Welcome):
            self._heartbeat_s = order.spec.heartbeat_s
            self._hurry.set()  # the writer may be waiting for longer than the run allows
            if not self.link.is_up:  # another one may come later, with news of the directory
                self._note_up()
        await self._deliver(order)

    def _note_up(self) -> None:
        self.link.is_up, self.link.since_s, self.link.trouble = True, time.monotonic(), ""
        self.link.num_connects += 1
        log.info("session open", address=self._control.address)

    def _note_down(self, error: HexcombError) -> None:
        self.link.is_up, self.link.since_s, self.link.trouble = False, time.monotonic(), error.sentence()


async def _within(deadline_s: float, waited: Any) -> Any:
    try:
        async with asyncio.timeout(deadline_s):
            return await waited
    except TimeoutError:
        raise UnreachableError("the coordinator is silent", why=f"nothing moved within {deadline_s:g} s") from None
