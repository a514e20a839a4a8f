"""Client mistakes, sent to the original server and to ours. Those of vLLM are in test_vllm_parity.py, which already
starts its server."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.interop.environments import CLIENTS, ROOT
from tests.serve.mistakes import FORMS, replies_to_mistakes, sentences
from tests.serve.process import ServerProcess, free_port

pytestmark = pytest.mark.interop
START_SECONDS = 60.0
INFER = FORMS["triton"].path
PARSED = "a 500 would blame the server for what the client sent"
LENGTHS = {"name": "sequence_lengths", "shape": [1, 1], "datatype": "INT64", "data": [4]}


@dataclass(frozen=True)
class Case:
    """differs  why the two status codes differ; if set, they must differ"""

    call: Callable[[httpx.Client], httpx.Response]
    differs: str = ""


def infer(*inputs: dict[str, Any], **fields: Any) -> Callable[[httpx.Client], httpx.Response]:
    return lambda http: http.post(INFER, json={"inputs": list(inputs), **fields})


def tokens(shape: list[int], data: list[Any], datatype: str = "INT64") -> dict[str, Any]:
    return {"name": "tokens", "shape": shape, "datatype": datatype, "data": data}


# Mistakes in tensors, in addition to those of any body.
TENSORS = {
    "unknown model": Case(lambda http: http.post("/v2/models/nobody/infer", json={"inputs": sentences("a")})),
    "unknown version": Case(lambda http: http.post("/v2/models/reward_model/versions/7/infer", json={"inputs": []})),
    "metadata of an unknown model": Case(lambda http: http.get("/v2/models/nobody")),
    "an unknown model that should be ready": Case(lambda http: http.get("/v2/models/nobody/ready")),
    "a version that should be ready": Case(lambda http: http.get("/v2/models/reward_model/versions/7/ready")),
    "unknown input": Case(infer({**sentences("a")[0], "name": "texts"})),
    "unknown output": Case(infer(*sentences("a"), outputs=[{"name": "values"}])),
    "floats for tokens": Case(infer(tokens([1, 4], [1.0, 2.0, 3.0, 4.0], "FP32"), LENGTHS)),
    "a datatype that is none": Case(infer(tokens([1, 4], [1, 2, 3, 4], "INT65"), LENGTHS)),
    "an axis too few": Case(infer(tokens([4], [1, 2, 3, 4]), LENGTHS)),
    "an axis too many": Case(infer(tokens([1, 1, 4], [1, 2, 3, 4]), LENGTHS)),
    "rows that differ": Case(infer(tokens([2, 2], [1, 2, 3, 4]), LENGTHS)),
    "an input twice": Case(infer(*sentences("a"), *sentences("a"))),
    "no data": Case(infer({"name": "sentences", "shape": [1, 1], "datatype": "BYTES"})),
    "more rows than a batch has": Case(
        infer({"name": "sentences", "shape": [5000, 1], "datatype": "BYTES", "data": ["a"] * 5000})
    ),
    "a header that is longer than the body": Case(
        lambda http: http.post(INFER, content=b"{}", headers={"inference-header-content-length": "99"})
    ),
    "fewer numbers than the shape": Case(infer(tokens([1, 4], [1, 2]), LENGTHS), PARSED),
    "text for numbers": Case(infer(tokens([1, 4], list("abcd")), LENGTHS), PARSED),
    "a negative size": Case(infer({**sentences("a")[0], "shape": [-1, 1]}), PARSED),
    "no rows": Case(
        infer({"name": "sentences", "shape": [0, 1], "datatype": "BYTES", "data": []}), "no rewards for no rows"
    ),
    "tokens without lengths": Case(infer(tokens([1, 4], [1, 2, 3, 4])), "the original's function falls over it"),
}


@pytest.fixture(scope="module")
def pytriton() -> Iterator[httpx.Client]:
    python = ROOT / ".venv-pytriton" / "bin" / "python"
    if not (ROOT / ".venv-pytriton" / ".installed").exists():
        pytest.skip(".venv-pytriton is not there: `make interop` makes it, and runs this")
    port = free_port()
    process = subprocess.Popen(
        [python, CLIENTS / "pytriton_server.py", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            wait_ready(http)
            yield http
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def wait_ready(http: httpx.Client) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if http.post(INFER, json={"inputs": sentences("a")}).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"PyTriton not ready within {START_SECONDS} s")


def test_pytriton_and_plaudit_give_the_same_status_for_the_twelve_mistakes(
    pytriton: httpx.Client, server: ServerProcess
) -> None:
    form = FORMS["triton"]
    theirs, ours = replies_to_mistakes(pytriton, form), replies_to_mistakes(server.http, form)
    statuses = {mistake: reply.status_code for mistake, reply in theirs.items()}
    assert statuses == {**form.statuses, **form.originally}
    assert {mistake: reply.status_code for mistake, reply in ours.items()} == form.statuses
    for mistake, reply in [*theirs.items(), *ours.items()]:
        assert reply.status_code == 200 or form.shape(reply.json()), (mistake, reply.text)


def test_pytriton_and_plaudit_reject_the_same_tensors(pytriton: httpx.Client, server: ServerProcess) -> None:
    wrong = []
    for name, case in TENSORS.items():
        theirs, ours = case.call(pytriton), case.call(server.http)
        if (theirs.status_code == ours.status_code) == bool(case.differs):
            wrong.append(f"{name}: {theirs.status_code} {theirs.text[:100]} and {ours.status_code} {ours.text[:100]}")
        assert ours.status_code == 200 or FORMS["triton"].shape(ours.json()), (name, ours.text)
        assert ours.status_code < 500, (name, ours.text)
    assert not wrong, "PyTriton and Plaudit:\n" + "\n".join(wrong)
