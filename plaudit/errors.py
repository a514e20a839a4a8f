"""Every error a user can meet. The message is one line: what was found, what was expected, and the cure.

    PlauditError
    ├── ChannelError       weights that did not reach an engine
    │   ├── ReceiverLost   ... because it is dead or late; `names` says which
    │   ├── WeightsRefused ... because they are not what was expected: names, shapes, dtypes, version, checksum
    │   └── ProbeFailed    ... though all said so: trainer and engine give other log-probs for the same tokens
    ├── ConfigError        a recipe, an override or an option that cannot be
    ├── DataError          a data file, a line of it, or a world that cannot give what was asked
    ├── NoAnswer           a search in which no path of any question gave an answer
    ├── ModelError         a model directory that cannot be loaded
    │   └── UnsafeModel    ... because loading it would run somebody's code
    ├── RequestError       a prompt, a score request or sampling options the engine refuses
    │   ├── Aborted        work that was cancelled or ran past its deadline
    │   └── Refused        one item that cannot be scored; `type` says why in a word
    ├── RunError           a run directory that cannot be used
    │   ├── RunBusy        ... because another process is using it
    │   └── BadCheckpoint  ... because a checkpoint in it is damaged
    ├── RankLost           another rank of the same model is gone or late; that one's own message says why
    ├── ServerError        a reward server that did not give what it was asked for
    │   ├── RewardUnavailable  ... within the time and attempts it had
    │   ├── RequestRefused     ... because it refuses the request; `status` and `type` say why
    │   ├── BadReply           ... but something that cannot be right: nothing of it is used
    │   └── VersionChanged     ... but scores of another version of the model
    ├── EngineError        a rollout engine that did not do what it was asked
    │   ├── EngineLost     ... because it has died, or does not answer in time
    │   └── StaleWeights   ... because its weights are not those it was sent
    └── StorageError       the disk refused a write; what was there before is intact

`cli.main` prints any of these as one line and exits 2. Anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class PlauditError(Exception):
    """The root: catch this to catch everything Plaudit raises on purpose."""

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
    exit_code = 75  # EX_TEMPFAIL: never the cause


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
    """A library's message, which may run over many lines, as the tail of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The tail of an "unknown name" message: the closest known name, or all of them."""
    names = sorted(candidates)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}" if names else "none is known"
