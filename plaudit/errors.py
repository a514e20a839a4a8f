"""All errors for users. The message is one line: the actual value, the expected value, and the fix.

    PlauditError
        ├── ChannelError       weights did not reach an engine
        │   ├── ReceiverLost   ... because it exited or timed out; `names` lists the receivers
        │   ├── WeightsRefused ... because they are not as expected: names, shapes, dtypes, version, checksum
        │   └── ProbeFailed    ... although reported as received: trainer and engine compute different log-probs
        ├── ConfigError        an invalid recipe, override or option
        ├── DataError          an invalid data file or line, or a world that cannot provide what is requested
        ├── NoAnswer           a search in which no path of any question ended in an answer
        ├── ModelError         a model directory that cannot be loaded
        │   └── UnsafeModel    ... because loading it would run untrusted code
        ├── RequestError       a prompt, a score request or sampling options that the engine rejects
        │   ├── Aborted        work that was cancelled or exceeded its deadline
        │   └── Refused        one item that cannot be scored; `type` is the reason for programs
        ├── RunError           a run directory that cannot be used
        │   ├── RunBusy        ... because another process is using it
        │   └── BadCheckpoint  ... because a checkpoint in it is damaged
        ├── RankLost           another rank of the same model exited or timed out; its own message has the cause
        ├── ServerError        a reward server that did not return what was requested
        │   ├── RewardUnavailable  ... within the timeout and the number of attempts
        │   ├── RequestRefused     ... because it rejects the request; `status` and `type` have the reason
        │   ├── BadReply           ... but an invalid reply, which is discarded
        │   └── VersionChanged     ... but scores of another version of the model
        ├── EngineError        a rollout engine that did not do what was requested
        │   ├── EngineLost     ... because it exited or timed out
        │   └── StaleWeights   ... because its weights are not those it was sent
        └── StorageError       the disk rejected a write; existing files are intact

`cli.main` prints any of these as one line and exits with code 2. Anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class PlauditError(Exception):
    """The base class of all errors that Plaudit raises deliberately."""

    exit_code = 2


class ChannelError(PlauditError):
    pass


class ReceiverLost(ChannelError):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.names: tuple[str, ...] = (name,)

    @classmethod
    def several(cls, losses: Sequence[ReceiverLost]) -> ReceiverLost:
        """One error for all of them."""
        if len(losses) == 1:
            return losses[0]
        together = cls("", "")
        together.args = ("; ".join(map(str, losses)),)
        together.names = tuple(name for loss in losses for name in loss.names)
        return together


class WeightsRefused(ChannelError):
    pass


class ProbeFailed(ChannelError):
    pass


class ConfigError(PlauditError):
    pass


class DataError(PlauditError):
    pass


class NoAnswer(PlauditError):
    pass


class ModelError(PlauditError):
    pass


class UnsafeModel(ModelError):
    pass


class RequestError(PlauditError):
    pass


class Aborted(RequestError):
    pass


class Refused(RequestError):
    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        self.type = type


class RunError(PlauditError):
    pass


class RunBusy(RunError):
    pass


class BadCheckpoint(RunError):
    pass


class RankLost(PlauditError):
    exit_code = 75  # EX_TEMPFAIL: never the root cause


class ServerError(PlauditError):
    pass


class RewardUnavailable(ServerError):
    pass


class RequestRefused(ServerError):
    def __init__(self, status: int, type: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.type = type


class BadReply(ServerError):
    pass


class VersionChanged(ServerError):
    pass


class EngineError(PlauditError):
    pass


class EngineLost(EngineError):
    pass


class StaleWeights(EngineError):
    pass


class StorageError(PlauditError):
    pass


def one_line(error: BaseException, limit: int = 300) -> str:
    """A library's error message, which may have many lines, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The end of an "unknown name" message: the closest known name, or all names."""
    names = sorted(candidates)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}" if names else "none is known"
