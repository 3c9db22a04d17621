"""Streams to nodes: one for each node, bounded, and whoever does not read loses it."""

import asyncio

from coordinator.sessions import MAX_WAITING, Outbox, Sessions
from protocol.errors import RefusedError, UnreachableError
from protocol.ids import PeerId
from protocol.v1 import control_pb2

FOX, HEN = PeerId("fox"), PeerId("hen")
MESSAGE = control_pb2.SessionResponse(role_assigned=control_pb2.RoleAssigned(role="idle"))


async def test_messages_go_to_those_that_have_a_stream() -> None:
    sessions, fox, hen = Sessions(), Outbox(), Outbox()
    sessions.open(FOX, fox)
    sessions.send([FOX, HEN], MESSAGE)
    sessions.open(HEN, hen)
    sessions.broadcast(MESSAGE)
    assert (fox.messages.qsize(), hen.messages.qsize()) == (2, 1)


async def test_an_outbox_is_bounded_and_says_why_it_ended() -> None:
    sessions, fox, hen = Sessions(), Outbox(), Outbox()
    sessions.open(FOX, fox)
    sessions.open(HEN, hen)
    for _ in range(MAX_WAITING):
        sessions.send([FOX], MESSAGE)
    assert not fox.ended.done()
    for _ in range(10):
        sessions.broadcast(MESSAGE)
    assert fox.messages.qsize() == MAX_WAITING
    assert isinstance(await fox.ended, UnreachableError)
    assert "does not read" in fox.ended.result().why
    assert not hen.ended.done()


async def test_a_newer_stream_takes_over_and_the_older_one_cannot_close_it() -> None:
    sessions, older, newer = Sessions(), Outbox(), Outbox()
    sessions.open(FOX, older)
    sessions.open(FOX, newer)
    assert isinstance(await older.ended, RefusedError)
    assert not sessions.close(FOX, older)
    sessions.send([FOX], MESSAGE)
    assert (older.messages.qsize(), newer.messages.qsize()) == (0, 1)
    assert sessions.close(FOX, newer)
    assert not sessions.close(FOX, newer)
    sessions.broadcast(MESSAGE)
    assert newer.messages.qsize() == 1


async def test_the_first_reason_to_end_counts_and_a_cancelled_end_is_no_error() -> None:
    outbox = Outbox()
    outbox.end(RefusedError("first"))
    outbox.end(RefusedError("second"))
    assert (await outbox.ended).what == "first"
    given_up = Outbox()
    given_up.ended.cancel()
    given_up.end(RefusedError("late"))
    await asyncio.sleep(0)
    assert given_up.ended.cancelled()
