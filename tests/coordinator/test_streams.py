"""Sessions under bad callers: who is silent, deaf, doubled or rude loses its stream, and nobody else does."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from coordinator import control_service
from coordinator.announcements import Announcer
from node.orders import RoundAborted, Welcome, order_of
from protocol.errors import (
    HexcombError,
    UnreachableError,
    UsageError,
)
from protocol.ids import Version
from protocol.v1 import control_pb2
from tests.coordinator.office import DEADLINE_S, Member, Office, typed

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def streaming(member: Member, *messages: control_pb2.SessionRequest) -> Any:
    """A raw session that has said `messages` and nothing more."""
    call = member.control.stub.Session()
    for message in messages:
        await call.write(message)
    return call


async def end_of(call: Any) -> HexcombError:
    """What a session ended with."""
    with pytest.raises(HexcombError) as caught:  # noqa: PT012 - messages before the end are read
        async with asyncio.timeout(DEADLINE_S):
            while await typed(call.read()) is not grpc.aio.EOF:
                pass
            await typed(call)
    return caught.value


HELLO = control_pb2.SessionRequest(hello=control_pb2.Hello(program="test"))


async def test_a_session_begins_with_a_hello(office: Office) -> None:
    member = await office.join()
    await member.hello()
    for first in (control_pb2.SessionRequest(), control_pb2.SessionRequest(heartbeat=control_pb2.Heartbeat())):
        with office.refuses(UsageError, match="not a hello"):
            raise await end_of(await streaming(member, first))
    call = await streaming(member)
    await call.done_writing()
    assert isinstance(await end_of(call), UsageError)
    assert member.session is not None
    assert (member.session.link.num_connects, member.session.link.is_up) == (1, True)


async def test_whoever_says_nothing_is_cut_off(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_service, "HELLO_DEADLINE_S", 0.2)
    member = await office.join()
    with office.refuses(UnreachableError, match=r"said nothing for 0\.2 s"):
        raise await end_of(await streaming(member))
    assert member.identity.peer_id not in office.core.soft.live
    assert await member.hello()


async def test_a_second_session_takes_the_place_of_the_first(office: Office) -> None:
    member = await office.join()
    first = await streaming(member, HELLO)
    assert isinstance(order_of(await first.read()), Welcome)
    second = await streaming(member, HELLO)
    assert isinstance(order_of(await second.read()), Welcome)
    assert "took its place" in (await end_of(first)).why
    assert member.identity.peer_id in office.core.soft.live
    assert office.core.soft.live[member.identity.peer_id].ended_ms is None
    second.cancel()
    await office.until(lambda: office.core.soft.live[member.identity.peer_id].ended_ms)


async def test_nothing_comes_before_the_welcome(office: Office) -> None:
    member = await office.join()
    call = await streaming(member)
    noise = control_pb2.SessionResponse(role_assigned=control_pb2.RoleAssigned(role="idle"))
    office.coordinator.sessions.send([member.identity.peer_id], noise)
    await call.write(HELLO)
    assert isinstance(order_of(await call.read()), Welcome)
    call.cancel()


async def test_a_node_that_does_not_read_loses_its_stream_and_the_others_do_not(office: Office) -> None:
    reader, sleeper = await office.join(), await office.join()
    await reader.hello()
    call = await streaming(sleeper, HELLO)
    outboxes = office.coordinator.sessions._outboxes
    await office.until(lambda: sleeper.identity.peer_id in outboxes)
    loud = control_pb2.SessionResponse(round_aborted=control_pb2.RoundAborted(round_id="0.1", reason="x" * 65_536))
    heard, num_said = 0, 0
    async with asyncio.timeout(DEADLINE_S):
        while sleeper.identity.peer_id in outboxes:
            office.coordinator.sessions.broadcast(loud)
            num_said += 1
            await reader.wait_for(RoundAborted)
            heard += 1
    assert heard == num_said < 1000
    await office.until(lambda: office.core.soft.live[sleeper.identity.peer_id].ended_ms)
    call.cancel()
    again = await streaming(sleeper, HELLO)
    assert isinstance(order_of(await again.read()), Welcome)
    again.cancel()


async def test_hostile_words_in_hello_and_heartbeat_are_made_harmless(office: Office) -> None:
    member = await office.join()
    ugly = "<script>\x1b[2J\n" + "é" * 1_000_000
    hello = control_pb2.Hello(program=ugly, endpoint=ugly, trainer_endpoint="h:99999", name="<script>")
    hello.capability.decode_tokens_per_s = float("nan")
    hello.capability.train_tokens_per_s = float("inf")
    hello.capability.memory_bytes = -1
    hello.capability.device = ugly
    beat = control_pb2.Heartbeat(version=2**63 - 1, root=ugly, activity=ugly, tokens_per_s=-1.0, engine=ugly)
    beat.versions_held.extend(range(100_000))
    requests = [control_pb2.SessionRequest(hello=hello), control_pb2.SessionRequest(heartbeat=beat)]
    call, peer_id = await streaming(member, *requests), member.identity.peer_id
    live = office.core.soft.live
    await office.until(lambda: peer_id in live and live[peer_id].presence.version >= 0)
    presence, capability = office.core.soft.live[peer_id].presence, office.core.soft.capabilities[peer_id]
    assert (presence.name, presence.endpoint, presence.trainer_endpoint) == ("", "", "")
    assert presence.activity == presence.engine == capability.device == "script2J"
    assert (capability.decode_tokens_per_s, capability.train_tokens_per_s, capability.memory_bytes) == (0.0, 0.0, 0)
    assert (presence.tokens_per_s, len(presence.root), len(presence.versions_held)) == (0.0, 64, 16)
    call.cancel()


async def test_a_node_that_comes_while_a_version_is_being_committed_is_greeted(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its announcement follows on the open stream."""
    _, rollout = await office.swarm()
    authority, nothing = office.coordinator.authority, cast(Any, None)

    async def not_yet(version: Version) -> None:
        assert version == office.head[0]

    monkeypatch.setattr(authority, "manifest", not_yet)
    announcer = Announcer(office.home, nothing, authority, nothing, nothing, nothing, office.clock)
    messages = await announcer.greeting(rollout.identity.peer_id)
    assert [message.WhichOneof("message") for message in messages] == ["role_assigned"]
    monkeypatch.undo()
    messages = await announcer.greeting(rollout.identity.peer_id)
    assert [message.WhichOneof("message") for message in messages] == ["version_announced", "role_assigned"]
