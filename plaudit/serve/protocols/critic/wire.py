"""NeMo-Aligner's critic over Triton's HTTP: `critic_infer`, `critic_train`, `critic_save`.

    critic_infer  tokens [B, T] with sequence_lengths [B, 1], or sentences [B, 1]  ->  values [B, T], rewards [B, 1]
    critic_train  tokens [N, T]; returns, prev_values, mask [N, T-1]               ->  loss_mean [1]
    critic_save   dummy_var [1]                                                    ->  status [1]

values[:, t] is the value after token t, so column t of `returns` belongs to token t + 1. A row is truncated after the
last token of its mask: the model is causal, so padding behind it has no effect.

A critic_train may have two additional parameters: `update_id`, under which the server stores its reply, so that a
retried request trains only once; and `updates`, the number of updates the caller has seen: a critic with another number
rejects the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from plaudit.serve.http.message import HttpError, Reply
from plaudit.serve.protocols.triton import wire as triton
from plaudit.serve.protocols.triton.wire import Infer, Signature, Spec, Tensor

VALUES = Spec("values", "FP32", (-1,))
INFER = Signature(triton.TEXT_OR_TOKENS, (VALUES,))
INFER_BOTH = Signature(triton.TEXT_OR_TOKENS, (VALUES, Spec("rewards", "FP32", (-1,))))
TRAIN = Signature(
    (
        Spec("tokens", "INT64", (-1, -1)), Spec("returns", "FP32", (-1, -1)), Spec("prev_values", "FP32", (-1, -1)),
        Spec("mask", "FP32", (-1, -1)),
    ),
    (Spec("loss_mean", "FP32", (1,)),), batched=False, optional=False,
)  # fmt: skip
SAVE = Signature((Spec("dummy_var", "INT64", (1,)),), (Spec("status", "INT64", (1,)),), batched=False, optional=False)
LONGEST_ID = 128


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """Rows to train on. `mask`, `returns` and `values` are flat, with one entry for each token after a row's prompt.

    prompts    the number of tokens of each row before the first one trained on
    update_id  "" if not given
    updates    None if not given
    """

    tokens: list[list[int]]
    prompts: list[int]
    mask: np.ndarray
    returns: np.ndarray
    values: np.ndarray
    update_id: str
    updates: int | None


def write_error(error: HttpError, request_id: str) -> Reply:
    """Triton's error format, with our error type added."""
    reply = triton.write_error(error, request_id)
    reply.body = msgspec.json.encode({"error": str(error), "type": error.type})
    return reply


def read_training_rows(infer: Infer) -> TrainingRows:
    tensors = [_needed(infer, spec.name) for spec in TRAIN.inputs]
    tokens = _matrix(tensors[0], "tokens", "iu")
    count, columns = tokens.shape
    returns, values, mask = (
        _matrix(tensor, spec.name, "f" if spec.name != "mask" else "fiub")
        for tensor, spec in zip(tensors[1:], TRAIN.inputs[1:], strict=True)
    )
    for name, array in (("returns", returns), ("prev_values", values), ("mask", mask)):
        if array.shape != (count, columns - 1):
            raise _bad(f"{name} must have shape [{count}, {columns - 1}], one column less than tokens; {_shape(array)}")
        bad = ~np.isfinite(array)
        if bad.any():
            row, column = np.argwhere(bad)[0].tolist()
            raise _bad(
                f"{name}[{row}, {column}] is {array[row, column]}; expected a finite number; the weights are unchanged"
            )
    if not np.isin(mask, (0, 1)).all():
        row, column = np.argwhere(~np.isin(mask, (0, 1)))[0].tolist()
        raise _bad(f"mask[{row}, {column}] is {mask[row, column]:g}; expected 0 or 1")
    return _training_rows(tokens, returns, values, mask.astype(bool), infer.parameters)


def _training_rows(
    tokens: np.ndarray, returns: np.ndarray, values: np.ndarray, mask: np.ndarray, parameters: Mapping[str, Any]
) -> TrainingRows:
    rows, prompts, spans = [], [], []
    for row in np.flatnonzero(mask.any(axis=1)).tolist():
        where = np.flatnonzero(mask[row])
        first, last = int(where[0]), int(where[-1])
        rows.append(tokens[row, : last + 2].tolist())
        prompts.append(first + 1)
        spans.append((row, slice(first, last + 1)))
    if not rows:
        raise _bad(f"mask is 0 everywhere in {len(tokens)} rows; expected a token to train on")

    def flat(values: np.ndarray, kind: str) -> np.ndarray:
        return np.concatenate([values[span] for span in spans]).astype(kind)

    id, updates = parameters.get("update_id", ""), parameters.get("updates")
    if not isinstance(id, str) or len(id) > LONGEST_ID:
        raise _bad(f"parameter update_id is {str(id)[:40]!r}; expected at most {LONGEST_ID} characters")
    if updates is not None and (type(updates) is not int or updates < 0):
        raise _bad(f"parameter updates is {str(updates)[:40]!r}; expected a number of updates")
    return TrainingRows(rows, prompts, flat(mask, "?"), flat(returns, "<f4"), flat(values, "<f4"), id, updates)


def check_save(infer: Infer) -> None:
    dummy = _needed(infer, "dummy_var")
    if not isinstance(dummy.values, np.ndarray) or len(dummy.values) != 1:
        raise _bad(f"dummy_var must be a single number; it has shape {list(dummy.shape)}")


def padded(rows: list[np.ndarray], columns: int) -> np.ndarray:
    """Pads the rows with zeros to [B, columns]."""
    values = np.zeros((len(rows), columns), dtype=np.float32)
    for at, row in enumerate(rows):
        values[at, : len(row)] = row
    return values


def _needed(infer: Infer, name: str) -> Tensor:
    if name not in infer.tensors:
        raise _bad(f"input {name!r} is missing")
    return infer.tensors[name]


def _matrix(tensor: Tensor, name: str, kinds: str) -> np.ndarray:
    values = tensor.values
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
        raise _bad(
            f"{name} has the wrong datatype; expected {next(s.datatype for s in TRAIN.inputs if s.name == name)}"
        )
    if len(tensor.shape) != 2 or tensor.shape[1] < (2 if name == "tokens" else 1):
        raise _bad(f"{name} has shape {list(tensor.shape)}; expected [rows, columns] with two tokens or more in a row")
    with np.errstate(over="ignore"):
        return values.reshape(tensor.shape).astype("<f4") if kinds == "f" else values.reshape(tensor.shape)


def _shape(values: np.ndarray) -> str:
    return f"its shape is {list(values.shape)}"


def _bad(message: str) -> HttpError:
    return HttpError(400, "invalid_tensor", message)
