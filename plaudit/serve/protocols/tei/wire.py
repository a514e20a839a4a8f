"""Text Embeddings Inference (/predict, /rerank, /info), and huggingface_hub's text classification.

In /predict a list of two texts is a pair; several texts are a list of lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from plaudit.serve.http.message import HttpError, Reply, given

T = TypeVar("T", bound=msgspec.Struct)
FORMS = "a text, a pair of texts, or a list of [text] and [text, text]"
# (status, error_type), by our error type, then by our status
BY_TYPE = {
    "overloaded": (429, "Overloaded"), "too_long": (413, "Validation"), "too_many_items": (413, "Validation"),
    "too_many_tokens": (413, "Validation"), "empty": (400, "Empty"), "bad_text": (422, "Tokenizer"),
    "bad_tokens": (422, "Tokenizer"), "wrong_kind": (424, "Backend"), "unknown_model": (424, "Backend"),
}  # fmt: skip
BY_STATUS = {503: (503, "Unhealthy"), 500: (424, "Backend"), 504: (504, "Backend")}


def write_error(error: HttpError, request_id: str) -> Reply:
    status, name = BY_TYPE.get(error.type) or BY_STATUS.get(error.status, (error.status, "Validation"))
    return error.shaped({"error": str(error), "error_type": name}, request_id, status)


class _Scored(msgspec.Struct, kw_only=True):
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"
    raw_scores: bool = False

    def side(self, default: bool) -> Literal["left", "right"] | None:
        """The side to truncate, if truncation was requested, or by `default` and not disabled."""
        if not (default if self.truncate is None else self.truncate):
            return None
        return "left" if self.truncation_direction.lower() == "left" else "right"


class Predict(_Scored):
    inputs: Any

    def texts(self) -> tuple[list[tuple[str, str | None]], bool]:
        """Texts and pairs, and whether the reply is one list instead of a list of lists."""
        inputs = self.inputs
        if isinstance(inputs, str):
            return [(inputs, None)], True
        if isinstance(inputs, list) and inputs and isinstance(inputs[0], str):
            return [_sequence(inputs, "inputs")], True
        if isinstance(inputs, list) and inputs:
            return [_sequence(entry, f"inputs[{place}]") for place, entry in enumerate(inputs)], False
        if inputs == []:
            raise HttpError(400, "empty", "`inputs` cannot be empty")
        raise HttpError(422, "invalid_request", f"inputs is a {type(inputs).__name__}; expected {FORMS}")


class TeiRerank(_Scored):
    query: str
    texts: list[str]
    return_text: bool = False


class _Parameters(msgspec.Struct, forbid_unknown_fields=True):
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    top_k: Annotated[int, Meta(ge=1)] | None = None


class Pipeline(msgspec.Struct, forbid_unknown_fields=True):
    """InferenceClient's tasks come to one path. A text classification has `parameters`, if only an empty object."""

    inputs: str | list[str]
    parameters: _Parameters


class FeatureExtraction(msgspec.Struct, forbid_unknown_fields=True):
    inputs: str | list[str]
    truncate: bool = True
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"
    normalize: bool | None = None


def decoded(fields: Mapping[str, Any], kind: type[T], about: str = "") -> T:
    """about   added to an error"""
    try:
        return msgspec.convert(given(fields), kind)
    except msgspec.ValidationError as error:
        raise HttpError(422, "invalid_request", f"{error}{about}") from None


def _sequence(entry: Any, what: str) -> tuple[str, str | None]:
    if not isinstance(entry, list) or not 1 <= len(entry) <= 2 or not all(isinstance(text, str) for text in entry):
        raise HttpError(422, "invalid_request", f"{what} is neither a text nor a pair of texts; expected {FORMS}")
    return entry[0], entry[1] if len(entry) == 2 else None


def predictions(values: np.ndarray, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Every label with its score, best first."""
    entries = [{"score": float(value), "label": label} for value, label in zip(values, labels, strict=True)]
    return sorted(entries, key=lambda entry: -float(entry["score"]))


def ranks(request: TeiRerank, values: Sequence[float]) -> list[dict[str, Any]]:
    order = sorted(range(len(values)), key=lambda place: -values[place])
    if not request.return_text:
        return [{"index": place, "score": values[place]} for place in order]
    return [{"index": place, "text": request.texts[place], "score": values[place]} for place in order]


def info(
    name: str, version: str, labels: Sequence[str], limit: int, most_items: int, server: str, *, cuts: bool
) -> dict[str, Any]:
    classes = {
        "id2label": {str(place): label for place, label in enumerate(labels)},
        "label2id": {label: place for place, label in enumerate(labels)},
    }
    return {
        "model_id": name, "model_sha": version, "model_dtype": "float32", "served_model_name": name,
        "model_type": {"reranker" if len(labels) == 1 else "classifier": classes},
        "max_concurrent_requests": most_items,
        "max_input_length": limit, "max_batch_tokens": limit, "max_batch_requests": None,
        "max_client_batch_size": most_items, "auto_truncate": cuts, "tokenization_workers": 1, "version": server,
        "sha": None, "docker_label": None,
    }  # fmt: skip
