"""The steps between the wire formats and the models: find the model, tokenise, score, read, count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plaudit.config.serve import ATTRIBUTES
from plaudit.errors import nearest
from plaudit.records import Item, ItemError, StepScores
from plaudit.reward.work import Work
from plaudit.serve.handle import ModelHandle, RequestContext, Result, ScoredItems
from plaudit.serve.http.message import HttpError, Request
from plaudit.serve.model import ServedModel
from plaudit.serve.registry import Models
from plaudit.serve.workers.jobs import Answer, GenerateJob

INPUT_ERRORS = frozenset(
    (
        "too_long", "empty", "bad_text", "bad_tokens", "bad_messages", "bad_steps", "no_steps", "bad_truth", "no_truth",
        "unsupported_form", "invalid_item", "refused", "no_weights",
    )
)  # fmt: skip
SCORED = ("outcome", "process")
# The default names for protocols whose requests name no model.
REWARD_MODEL, PROCESS_MODEL, LOGPROBS_MODEL = "reward_model", "process_model", "logprobs_model"
EMBEDDING_MODEL = "embedding_model"
DEFAULT_KINDS = {
    REWARD_MODEL: "outcome", PROCESS_MODEL: "process", LOGPROBS_MODEL: "logprobs", EMBEDDING_MODEL: "embedding",
}  # fmt: skip


class ScoringService:
    """aliases  other names of models; `reward_model` is the first outcome model and `process_model` the first process
    model unless set, or a model has that name
    unmerged  aliases under which every label of a model is a separate reward
    salted   whether callers with different keys must not share cached scores
    """

    def __init__(self, models: Models, aliases: Mapping[str, str], most_items: int, *, salted: bool) -> None:
        self.models = models
        self.most_items = most_items
        self._salted = salted
        self._set = {alias: name.removesuffix(ATTRIBUTES) for alias, name in aliases.items()}
        self._aliases = self._with_defaults()
        self._swaps = models.swaps
        self.unmerged = {alias for alias, name in aliases.items() if name.endswith(ATTRIBUTES)}

    @property
    def aliases(self) -> Mapping[str, str]:
        if self._swaps != self.models.swaps:  # a swap may have changed a model's kind
            self._aliases, self._swaps = self._with_defaults(), self.models.swaps
        return self._aliases

    def _with_defaults(self) -> dict[str, str]:
        aliases = dict(self._set)
        for alias, kind in DEFAULT_KINDS.items():
            first = next((name for name, served in self.models.served.items() if served.kind == kind), None)
            if alias in self.models.served:
                aliases[alias] = alias
            elif first is not None:
                aliases.setdefault(alias, first)
        return aliases

    def find(self, name: str | None) -> ModelHandle:
        """Finds a model by its name or alias; the first one if None."""
        if name is None:
            return next(iter(self.models.served.values()))
        model = self.models.served.get(self.aliases.get(name, name))
        if model is None:
            names = [*self.models.served, *self.aliases]
            raise HttpError(404, "unknown_model", f"no model {name[:100]!r}; {nearest(name[:100], names)}")
        return model

    def find_model(self, name: str | None, kind: str | None = None) -> ServedModel:
        """Finds a model with a tokenizer: an outcome or process model, or one of the given kind."""
        served = self.find(name)
        if (
            not isinstance(served, ServedModel)
            or served.kind not in SCORED
            or (kind is not None and served.kind != kind)
        ):
            wanted = "outcome or process" if kind is None else kind
            raise HttpError(
                422, "wrong_kind", f"{served.name} is a {served.kind} model; this route needs an {wanted} model: "
                f"serve one, or select it with --alias {name or REWARD_MODEL}=NAME",
            )  # fmt: skip
        return served

    async def score(
        self, request: Request, served: ModelHandle, items: Sequence[Item], *, priority: int = 0, cache: bool = True,
    ) -> ScoredItems:  # fmt: skip
        """Returns a result per item. HttpError if there are too many, or if the whole request fails."""
        self.check_count(len(items))
        request.model = served.name
        scored = await served.score(items, self._context(request, priority, cache, path=served.kind == "process"))
        request.tokens += scored.tokens
        self._count(served.name, [result.error for result in scored.results], request)
        values = [r.aggregate if isinstance(r, StepScores) else r.value for r in scored.results]
        self.models.metrics.history.models[served.name].scores.extend([v for v in values if v is not None])
        return scored

    async def read(
        self, request: Request, served: ServedModel, works: Sequence[Work | GenerateJob], *, priority: int = 0,
        path: bool = False, salt: str | None = None,
    ) -> tuple[str, list[Answer]]:  # fmt: skip
        """Returns the version, and for each work the model's rows, the continuation, or an ItemError. Requests with
        different salts share nothing that is cached."""
        self.check_count(len(works))
        request.model = served.name
        version, answers = await served.read(works, self._context(request, priority, True, path, salt))
        request.tokens += sum(len(work.tokens) for work in works)
        self._count(served.name, [a if isinstance(a, ItemError) else None for a in answers], request)
        return version, answers

    @staticmethod
    def values(results: Sequence[Result], what: str) -> list[float]:
        """Scores for protocols that have no error for a single item: a failed item fails its request."""
        values = []
        for place, result in enumerate(results):
            value = result.aggregate if isinstance(result, StepScores) else result.value
            if value is None:
                assert result.error is not None
                status = 422 if result.error.type in INPUT_ERRORS else 500
                raise HttpError(status, result.error.type, f"{what}[{place}]: {result.error.message}")
            values.append(value)
        return values

    def check_count(self, count: int) -> None:
        if count > self.most_items:
            raise HttpError(
                422, "too_many_items", f"{count} inputs in one request; the limit is {self.most_items}; split it"
            )

    def _context(
        self, request: Request, priority: int, cache: bool, path: bool, own: str | None = None
    ) -> RequestContext:
        salt = request.tenant if self._salted else ""
        if own is not None:
            salt = f"{salt}\n{own}"  # no name of a key has a line break
        return RequestContext(request.tenant, request.id, request.deadline, priority, cache, salt, path)

    def drop(self, request: Request, served: ServedModel, error: ItemError) -> None:
        """Counts and logs a failed input, for protocols that leave it out of the reply without an error."""
        self._count(served.name, [error], request)
        self.models.log("dropped", model=served.name, error=error.type, message=error.message, request_id=request.id)

    def _count(self, model: str, errors: Sequence[ItemError | None], request: Request) -> None:
        metrics = self.models.metrics
        counts = metrics.history.models[model]
        good = 0
        for error in errors:
            if error is None:
                good += 1
                continue
            counts.failed += 1
            metrics.errors.labels(error.type).inc()
            metrics.history.error(error.type, error.message, model, request.id, request.tenant)
        request.items += len(errors)
        request.failed += len(errors) - good
        counts.items += good
        metrics.items.labels(model).inc(good)
