"""What the coordinator and its grading children say to each other. Pure: types alone."""

import msgspec

from protocol.run import EnvironmentSpec

ENVIRONMENT = "environment"
"""The reward that is the task's own score."""


class Conversation(msgspec.Struct, tag=True, frozen=True):
    """A completion in which the environment spoke too: its tokens are at `given` (start, how many)."""

    token_ids: tuple[int, ...]
    given: tuple[tuple[int, int], ...]


Completion = tuple[int, ...] | str | Conversation
"""Token ids as a node sent them, a text that the coordinator made up itself, or turns with what was replied to them."""


class RewardSpec(msgspec.Struct, frozen=True):
    """One reward of a run: `environment`, `math-verify` or `module:function`; how it is called, and what it counts."""

    function: str = ENVIRONMENT
    weight: float = 1.0
    is_chat: bool = False


class RewardPlan(msgspec.Struct, frozen=True):
    """All rewards of a run, and what their process may have: seconds for each call, bytes of address space. Functions
    are looked for in `folder` first; `hidden` are folders that they must not read."""

    rewards: tuple[RewardSpec, ...] = (RewardSpec(),)
    timeout_s: float = 10.0
    memory_bytes: int = 2 << 30
    folder: str | None = None
    hidden: tuple[str, ...] = ()

    @property
    def functions(self) -> tuple[RewardSpec, ...]:
        """Those that run in the sandbox."""
        return tuple(spec for spec in self.rewards if spec.function != ENVIRONMENT)


# To the child with the environment


class Open(msgspec.Struct, tag=True, frozen=True):
    """First request: the environment, and the folder with the tokenizer. Reply: `Opened`."""

    environment: EnvironmentSpec
    model_dir: str


class Opened(msgspec.Struct, tag=True, frozen=True):
    """The child is ready; `digest` is the environment's content hash, `name` what its task keys call it. Only an
    environment that `is_multi_turn` is asked for replies."""

    digest: str
    name: str
    is_multi_turn: bool = False


class MakePrompts(msgspec.Struct, tag=True, frozen=True):
    """Canonical prompts of tasks (environment, seed, index). Reply: `Prompts`."""

    tasks: tuple[tuple[str, int, int], ...]


class HeldOut(msgspec.Struct, tag=True, frozen=True):
    """At most `limit` distinct held-out tasks. Reply: `Prompts`."""

    limit: int


class Prompts(msgspec.Struct, tag=True, frozen=True):
    """Tasks and their prompts' token ids, in the order asked."""

    tasks: tuple[tuple[str, int, int], ...]
    prompt_ids: tuple[tuple[int, ...], ...]


class Reply(msgspec.Struct, tag=True, frozen=True):
    """What the environment says to completions that end with a turn of the model. Reply: `Replies`."""

    tasks: tuple[tuple[str, int, int], ...]
    completions: tuple[Completion, ...]


class Replies(msgspec.Struct, tag=True, frozen=True):
    """For each the token ids that follow, None where the conversation is over, or why that cannot be said."""

    replies: tuple[tuple[int, ...] | str | None, ...]


class Score(msgspec.Struct, tag=True, frozen=True):
    """The environment's own scores of completions. Reply: `Scores`."""

    tasks: tuple[tuple[str, int, int], ...]
    completions: tuple[Completion, ...]


class Scores(msgspec.Struct, tag=True, frozen=True):
    """One score for each completion; None = missing (a fault of the grader, never a zero)."""

    rewards: tuple[float | None, ...]


class Describe(msgspec.Struct, tag=True, frozen=True):
    """What reward functions want to know of completions. Reply: `Samples`."""

    tasks: tuple[tuple[str, int, int], ...]
    completions: tuple[Completion, ...]


class Sample(msgspec.Struct, frozen=True):
    """One completion as a reward function sees it; `columns` is a JSON object."""

    prompt: str
    completion: str
    completion_ids: tuple[int, ...]
    columns: str


class Samples(msgspec.Struct, tag=True, frozen=True):
    """In the order asked."""

    samples: tuple[Sample, ...]


# To the child with the reward functions


class OpenRewards(msgspec.Struct, tag=True, frozen=True):
    """First request; the child confines itself before it imports a function. Reply: `RewardsOpened`."""

    plan: RewardPlan


class RewardsOpened(msgspec.Struct, tag=True, frozen=True):
    """The functions are there. `holds` and `lacks` are the promises of the sandbox that this machine keeps, and those
    that it does not."""

    holds: tuple[str, ...]
    lacks: tuple[str, ...]


class Call(msgspec.Struct, tag=True, frozen=True):
    """Calls the function of that number among the plan's functions, once. Reply: `Values`."""

    number: int
    samples: tuple[Sample, ...]


class Values(msgspec.Struct, tag=True, frozen=True):
    """What the function returned, None = it leaves this sample out; `faults` are the places where it returned no
    number."""

    values: tuple[float | None, ...]
    faults: tuple[int, ...]


Request = Open | MakePrompts | HeldOut | Reply | Score | Describe
RewardRequest = OpenRewards | Call
