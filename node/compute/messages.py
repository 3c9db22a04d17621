"""What the daemon and its compute child say to each other. Pure: types alone.

One compute child does one job: it probes the machine, then becomes a rollout engine or a trainer, and is replaced
when the role changes. The daemon is a light process; torch lives only here. Requests have replies of the type that
their docstring names; `SlotAdvanced` and `SlotFilled` are events without request.
"""

import msgspec

from protocol.loss import LossSpec
from protocol.round import TrainSample
from protocol.run import EnvironmentSpec, OptimizerSpec, SamplingContract


class Probe(msgspec.Struct, tag=True, frozen=True):
    """Measure this machine on the model of `model_dir` (config.json). Of the GPU's memory no job takes more than
    `gpu_memory_share` (0 = no limit). Reply: `Probed`."""

    model_dir: str
    gpu_memory_share: float = 0.0


class Probed(msgspec.Struct, tag=True, frozen=True):
    """Measured rates."""

    decode_tokens_per_s: float
    train_tokens_per_s: float
    memory_bytes: int
    device: str


class EngineRate(msgspec.Struct, frozen=True):
    """What an engine did on this machine at `at_s` (Unix time); 0 tokens per second: it did not start, and `why`."""

    engine: str
    tokens_per_s: float
    why: str = ""
    at_s: float = 0.0


class StartRollout(msgspec.Struct, tag=True, frozen=True):
    """Become a rollout engine. `engine` is "auto", "vllm" or "transformers". Tokens of slots under way come as events,
    of at most `piece_tokens` tokens (0 = not at all) or `piece_s` seconds. `canary` is what the version's trainers
    expect of the probe (`protocol.canary`); empty = unknown. With each step of `restraint` it takes less, after
    crashes. `trust_remote_code` is the owner's word. `rates` are what is known of the engines, `is_first` that none has
    started here yet. Reply: `Started`, or an error of code ENGINE_UNTRUSTED,
    MODEL_REFUSED or another."""

    engine: str
    model_dir: str
    version: int
    weights: str
    environment: EnvironmentSpec
    contract: SamplingContract
    piece_tokens: int = 0
    piece_s: float = 1.0
    gpu_memory_share: float = 0.0
    canary: tuple[float, ...] = ()
    restraint: int = 0
    trust_remote_code: bool = False
    rates: tuple[EngineRate, ...] = ()
    is_first: bool = False


class StartTrainer(msgspec.Struct, tag=True, frozen=True):
    """Become a trainer, or begin anew as one, whose peer service listens on `listen_host` with this TLS material.
    `optimizer_state` is the file with the moments after `version` ("" = zeros, right only for version 0). Chunks of
    new versions are written into `blob_dir`. Reply: `Started`."""

    model_dir: str
    version: int
    body: bytes
    weights: str
    optimizer_state: str
    optimizer: OptimizerSpec
    temperature: float
    blob_dir: str
    run_id: str
    peer_id: str
    coordinator_key: bytes
    listen_host: str
    ca_certificate: bytes
    leaf_certificate: bytes
    leaf_key: bytes
    gpu_memory_share: float = 0.0
    loss: LossSpec = LossSpec()


class Started(msgspec.Struct, tag=True, frozen=True):
    """The job runs. `engine` names the rollout engine, `num_seats` are the samples that it runs at a time, `k3` is its
    divergence from the trainer's forward (None = there was nothing to compare with), `choice` says why it is this one,
    `rates` are what to remember; `endpoint` (host:port) is the trainer's peer service."""

    engine: str = ""
    num_seats: int = 0
    k3: float | None = None
    endpoint: str = ""
    choice: str = ""
    rates: tuple[EngineRate, ...] = ()


class SlotOrder(msgspec.Struct, frozen=True):
    """One slot to fill. `prompt_ids` are the canonical prompt's, whose digest the daemon has checked; `prefix_ids` are
    the tokens of its completion that others have sampled, and after which this engine goes on."""

    slot: str
    prompt_ids: tuple[int, ...]
    seed: int
    prefix_ids: tuple[int, ...] = ()


class Generate(msgspec.Struct, tag=True, frozen=True):
    """Fill these slots; each finished one comes as a `SlotFilled` event. Reply: `Done` when all are finished."""

    lease_id: str
    orders: tuple[SlotOrder, ...]


class StopSlots(msgspec.Struct, tag=True, frozen=True):
    """Stop working on these slots of a lease; those still running come as `SlotFilled` with the reason "abort". Reply:
    `Done`."""

    lease_id: str
    slots: tuple[str, ...]


class SlotAdvanced(msgspec.Struct, tag=True, frozen=True):
    """New tokens of a slot that is under way (event), all from one version; `start` is the position of the first in the
    completion, of which the order's prefix is a part."""

    lease_id: str
    slot: str
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


class SlotFilled(msgspec.Struct, tag=True, frozen=True):
    """A finished sample (event): all that this engine sampled, without the order's prefix. `segments` are (version,
    number of tokens); `finish_reason` may also be "abort", or "refused" where the engine cannot take the slot."""

    lease_id: str
    slot: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[tuple[int, int], ...]
    finish_reason: str


class MakePrompts(msgspec.Struct, tag=True, frozen=True):
    """Regenerate the prompts of tasks (environment, seed, index). Reply: `Prompts`."""

    tasks: tuple[tuple[str, int, int], ...]


class Prompts(msgspec.Struct, tag=True, frozen=True):
    """Token ids of each prompt, in order."""

    prompt_ids: tuple[tuple[int, ...], ...]


class Load(msgspec.Struct, tag=True, frozen=True):
    """Rollout: swap in the safetensors file in place, between tokens. Nothing that the new weights sample leaves before
    the probe agrees with `canary` (empty = unknown). Reply: `Loaded`, or an error of code WEIGHTS_UNFIT when the file
    does not fit and the old weights are served on, or ENGINE_UNTRUSTED: then this engine samples no more."""

    version: int
    weights: str
    canary: tuple[float, ...] = ()


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The version is in force. `difference` is the largest between the probe and its canary; None where there is
    none."""

    difference: float | None = None


class RunRound(msgspec.Struct, tag=True, frozen=True):
    """Trainer: do the member's part of a round. `plan` is the signed plan's payload, already verified by the daemon;
    `remaining_s` is the time until its deadline by the coordinator's clock; the new moments are written to
    `moments_path` before the reply. A round that is running when this comes is dropped. Reply: `RoundDone`, or an error
    of code ROUND_STALE with the suspects in `why` as comma-separated peer ids when peers did not do their part."""

    plan: bytes
    samples: tuple[TrainSample, ...]
    remaining_s: float
    moments_path: str


class RoundDone(msgspec.Struct, tag=True, frozen=True):
    """The version stands ready (not yet in force): its manifest body, the update's metrics, and the log-probabilities
    of the probe (`protocol.canary`) under it."""

    body: bytes
    metrics: dict[str, float]
    canary: tuple[float, ...] = ()


class Commit(msgspec.Struct, tag=True, frozen=True):
    """Trainer: the version made by `RoundDone` with this root is committed; put it in force. Reply: `Done`, or an error
    of code ROOT_MISMATCH if this trainer holds no such staged version."""

    version: int
    root: str


class AbortRound(msgspec.Struct, tag=True, frozen=True):
    """Trainer: drop everything of the running round. Reply: `Done`."""

    round_id: str


class Evaluate(msgspec.Struct, tag=True, frozen=True):
    """Trainer: complete each prompt greedily under the version in force, or, where they are given, under the version
    of `body`, whose safetensors file is `weights`. Reply: `Evaluated`."""

    prompt_ids: tuple[tuple[int, ...], ...]
    contract: SamplingContract
    body: bytes = b""
    weights: str = ""


class Evaluated(msgspec.Struct, tag=True, frozen=True):
    """The version that was used, and the completion of each prompt."""

    version: int
    completions: tuple[tuple[int, ...], ...]


class FetchOptimizerState(msgspec.Struct, tag=True, frozen=True):
    """Any job: fetch the moments after `version` from a trainer's `endpoint` into `path`, checked against `digest`,
    with this TLS material (for a trainer that starts late). Reply: `Done`."""

    endpoint: str
    peer_id: str
    version: int
    digest: str
    num_elements: int
    path: str
    ca_certificate: bytes
    leaf_certificate: bytes
    leaf_key: bytes


class Done(msgspec.Struct, tag=True, frozen=True):
    """It is done."""


Request = (
    Probe
    | StartRollout
    | StartTrainer
    | Generate
    | StopSlots
    | MakePrompts
    | Load
    | RunRound
    | Commit
    | AbortRound
    | Evaluate
    | FetchOptimizerState
)
Reply = Probed | Started | Loaded | Prompts | RoundDone | Evaluated | Done
ChildEvent = SlotAdvanced | SlotFilled
