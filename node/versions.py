"""The versions that a node knows, holds as chunks, and has as weight files. Impure: the disk, and fetches
by gRPC.

Invariants: nothing is known of a version but by a manifest that the coordinator signed; one version number
never stands for two roots, and each manifest's link fits the one before it where that is known; a weight
file exists only once every chunk in it had its hash. Manifests are kept on disk, so that a restarted node
serves what it holds.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc
import msgspec
import structlog

from node.bandwidth import Throttle
from node.home import Home
from node.weights.blobs import BlobStore
from node.weights.content import assemble, export_model, materialize_model
from node.weights.fetch import Holder, fetch_manifest, fetch_version
from protocol.certificates import Leaf
from protocol.errors import ChunkMissingError, HexcombError, ManifestRefusedError, UnreachableError
from protocol.grpc_options import CLIENT_OPTIONS
from protocol.ids import Digest, RunId, Version
from protocol.manifest import Body, Manifest, SignedManifest, open_manifest
from protocol.private_files import write_private
from protocol.tls import channel_credentials, channel_options

FETCH_DEADLINE_S = 300.0
MANIFEST_DEADLINE_S = 10.0
MAX_ANNOUNCED = 8
RETIRED_BYTES = 256 << 20
"""Room for chunks of retired versions; two versions' worth where that is more."""
MANIFESTS_KEPT = 100
"""Of retired versions. A chunk whose manifest is gone goes with it: after a restart nobody would know whose it was."""

HolderSource = Callable[[Version], Awaitable[Sequence[Holder]]]
"""Finds holders by asking now, of whoever may know."""

log = structlog.get_logger("versions")


class Versions:
    """What the node has of each version."""

    def __init__(
        self,
        home: Home,
        *,
        run_id: RunId,
        coordinator_key: bytes,
        leaf: Callable[[], Leaf],
        find: HolderSource,
        throttle: Throttle | None = None,
    ) -> None:
        self._throttle = throttle or Throttle()
        self._run_id, self._coordinator_key, self._leaf, self._find = run_id, coordinator_key, leaf, find
        self.blobs = BlobStore(home.blobs)
        self.model_dir = home.path / "model"
        self._weights, self._manifests = home.path / "weights", home.path / "manifests"
        for folder in (self._weights, self._manifests, self.model_dir):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._signed: dict[Version, SignedManifest] = {}
        self._known: dict[Version, Manifest] = {}
        self._holders: dict[Version, tuple[Holder, ...]] = {}
        self._held: set[Version] = set()
        self._fetching: dict[Version, asyncio.Lock] = {}
        self._kept_from = Version(0)
        self._retired: set[Digest] = set()
        self._clear_leftovers()
        self._recall()

    @property
    def head(self) -> Version | None:
        """The newest version known."""
        return max(self._known, default=None)

    @property
    def held(self) -> list[Version]:
        """Versions whose chunks are all here, ascending."""
        return sorted(self._held)

    @property
    def ready(self) -> Version | None:
        """The newest version whose weight file is here."""
        return max((version for version in self._known if self.weights_path(version).exists()), default=None)

    def learn(self, signed: SignedManifest, holders: Sequence[Holder] = ()) -> Manifest:
        """Takes a manifest in. Raises `ManifestRefusedError`; what was known then stays as it was."""
        manifest = open_manifest(signed, coordinator_key=self._coordinator_key, run_id=self._run_id)
        version = manifest.body.version
        self._check_chain(manifest)
        if holders:
            self._holders[version] = tuple(holders[:MAX_ANNOUNCED])
        if version not in self._known:
            self._known[version], self._signed[version] = manifest, signed
            data = msgspec.msgpack.encode((signed.payload, signed.signature))
            write_private(self._manifests / f"{version}.msgpack", data)
        return manifest

    def manifest(self, version: Version) -> Manifest | None:
        """The opened manifest, if known."""
        return self._known.get(version)

    def signed(self, version: Version) -> SignedManifest | None:
        """The manifest of a version whose chunks are here, for other nodes; -1 = the newest."""
        wanted = max(self._held, default=None) if version < 0 else version
        return self._signed.get(wanted) if wanted in self._held else None

    def canary(self, version: Version) -> tuple[float, ...]:
        """What the version's trainers compute of the probe; empty = unknown. Raises `ManifestRefusedError`."""
        return self._require(version).seal.canary

    def body(self, version: Version) -> Body:
        """What the version consists of. Raises `ManifestRefusedError` if it is not known."""
        return self._require(version).body

    def root(self, version: Version) -> Digest:
        """The committed root. Raises `ManifestRefusedError` if the version is not known."""
        return self.body(version).root

    def weights_path(self, version: Version) -> Path:
        """Where the weight file of a version stands once it is ready."""
        return self._weights / f"v{version}.safetensors"

    def check_held(self, version: Version) -> bool:
        """Looks whether all chunks are here, made by this node's trainer perhaps; hashes are checked when
        read."""
        body = self._require(version).body
        digests = (*body.chunks, *(file.digest for file in body.files))
        if all(self.blobs.has(digest) for digest in digests):
            self._held.add(version)
        else:
            self._held.discard(version)
        return version in self._held

    async def fetch(self, version: Version) -> None:
        """Brings all chunks of a known version here. Raises `ChunkMissingError`, `UnreachableError`."""
        body = self._require(version).body
        async with self._fetching.setdefault(version, asyncio.Lock()):
            if await asyncio.to_thread(self.check_held, version):
                return
            started_s = time.monotonic()
            try:
                await self._fetch_from(version, self._holders.get(version, ()))
            except HexcombError as error:
                log.info("announced holders were not enough", version=version, why=error.why)
                await self._fetch_from(version, await self._find(version))
            self._held.add(version)
            took_s = round(time.monotonic() - started_s, 3)
            log.info("version fetched", version=version, root=body.root[:12], took_s=took_s)

    async def make_ready(self, version: Version) -> Path:
        """The weight file of a known version, fetched and assembled if need be; the model's small files
        too."""
        await self.fetch(version)
        body, path = self._require(version).body, self.weights_path(version)
        if not path.exists():
            await asyncio.to_thread(assemble, body, self.blobs, path)
        if not (self.model_dir / "config.json").exists():
            await asyncio.to_thread(materialize_model, body, self.blobs, self.model_dir)
        return path

    def forget_weights(self, version: Version) -> None:
        """Removes the weight file of a version; `make_ready` makes it anew from its chunks."""
        self.weights_path(version).unlink(missing_ok=True)

    async def make_model_dir(self, version: Version) -> Path:
        """The folder with the model's small files, e.g. for a probe that needs no weights."""
        if not (self.model_dir / "config.json").exists():
            await self.fetch(version)
            body = self._require(version).body
            await asyncio.to_thread(materialize_model, body, self.blobs, self.model_dir)
        return self.model_dir

    async def export(self, version: Version, folder: Path) -> None:
        """Writes a known version as a model folder. Raises as `fetch` and `export_model` do."""
        await self.fetch(version)
        await asyncio.to_thread(export_model, self._require(version).body, self.blobs, folder)

    async def fetch_from_peers(self, version: Version, holders: Sequence[Holder]) -> Manifest:
        """Gets manifest and chunks of a version from `holders`; the coordinator is not asked."""
        for holder in holders if version not in self._known else ():
            try:
                signed = await fetch_manifest(
                    holder, version, channel_factory=self._open, deadline_s=MANIFEST_DEADLINE_S
                )
                self.learn(signed, holders)
                break
            except HexcombError as error:
                log.info("no manifest", version=version, holder=holder.peer_id, why=error.sentence())
        if version not in self._known:
            raise ChunkMissingError(f"nobody in the directory has version {version}", why=f"{len(holders)} were asked")
        await self.fetch(version)
        return self._require(version)

    async def retire(self, *, keep_from: Version, now_s: float) -> None:
        """Forgets the bytes of versions before `keep_from`; of the last `MANIFESTS_KEPT` of them manifests stay known
        for their seeds and their chain, and as long as they do what somebody who is slow may be fetching still, within
        `RETIRED_BYTES`. What no manifest names stays for a while: it may be the next version."""
        forgotten = set[Digest]()
        for version in [version for version in self._known if version < keep_from]:
            chunks = self._known[version].body.chunks
            if version >= self._kept_from:
                self._retired.update(chunks)
            self._held.discard(version)
            self.weights_path(version).unlink(missing_ok=True)
            self._holders.pop(version, None)
            self._fetching.pop(version, None)
            if version < keep_from - MANIFESTS_KEPT:
                forgotten.update(chunks)
                del self._known[version], self._signed[version]
                (self._manifests / f"{version}.msgpack").unlink(missing_ok=True)
        bodies = [manifest.body for version, manifest in self._known.items() if version >= keep_from]
        keep = {digest for body in bodies for digest in (*body.chunks, *(file.digest for file in body.files))}
        self._kept_from = keep_from
        for manifest in self._known.values() if forgotten else ():
            forgotten.difference_update(manifest.body.chunks)
        room = max(RETIRED_BYTES, 2 * sum(tensor.num_bytes for tensor in bodies[-1].tensors) if bodies else 0)
        await asyncio.to_thread(self._clean, keep, now_s=now_s, room=room, forgotten=forgotten)

    def _clean(self, keep: set[Digest], *, now_s: float, room: int, forgotten: set[Digest]) -> None:
        self.blobs.delete(forgotten)
        self.blobs.delete_unreferenced(keep, now_s=now_s, retired=self._retired - keep, retired_bytes=room)
        self._retired.intersection_update(set(self.blobs.digests()))

    async def _fetch_from(self, version: Version, holders: Sequence[Holder]) -> None:
        if not holders:
            raise UnreachableError(f"nobody is known to hold version {version}")
        await fetch_version(
            self._require(version).body,
            holders=holders,
            blobs=self.blobs,
            channel_factory=self._open,
            deadline_s=FETCH_DEADLINE_S,
            throttle=self._throttle,
        )

    def _open(self, holder: Holder) -> grpc.aio.Channel:
        credentials = channel_credentials(self._leaf(), coordinator_key=self._coordinator_key)
        options = [*CLIENT_OPTIONS, *channel_options(holder.peer_id)]
        return grpc.aio.secure_channel(holder.endpoint, credentials, options=options)

    def _require(self, version: Version) -> Manifest:
        manifest = self._known.get(version)
        if manifest is None:
            raise ManifestRefusedError(f"version {version} is not known here", why="no manifest of it has come")
        return manifest

    def _check_chain(self, manifest: Manifest) -> None:
        version = manifest.body.version
        known, before = self._known.get(version), self._signed.get(Version(version - 1))
        if known is not None and known.body.digest != manifest.body.digest:
            raise ManifestRefusedError(
                f"a second version {version} was refused", why="the coordinator signed two with this number"
            )
        if before is not None and manifest.seal.previous != before.digest:
            raise ManifestRefusedError(f"version {version} was refused", why="it does not follow the version before")

    def _clear_leftovers(self) -> None:
        """Removes what a killed daemon left half written."""
        for folder in (self._weights, self._manifests, self.model_dir):
            for path in folder.glob(".*"):
                path.unlink(missing_ok=True)

    def _recall(self) -> None:
        """Takes in the manifests on disk; a file that is damaged or of another run is removed."""
        paths = {int(path.stem): path for path in self._manifests.glob("*.msgpack") if path.stem.isdigit()}
        for number in sorted(paths):
            try:
                payload, signature = msgspec.msgpack.decode(paths[number].read_bytes(), type=tuple[bytes, bytes])
                signed = SignedManifest(payload, signature)
                manifest = open_manifest(signed, coordinator_key=self._coordinator_key, run_id=self._run_id)
            except (msgspec.DecodeError, ManifestRefusedError) as error:
                log.warning("manifest on disk dropped", path=paths[number].name, why=str(error))
                paths[number].unlink(missing_ok=True)
                continue
            version = manifest.body.version
            self._known[version], self._signed[version] = manifest, signed
            self.check_held(version)
