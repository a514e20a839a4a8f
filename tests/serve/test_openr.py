"""OpenR's client loop: request the worker's address from the controller, then step scores from the worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.reward import tiny
from tests.reward.tiny import QUESTION, STEPS
from tests.serve.process import ServerProcess

KEY = "openr-key-1"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.sentence_piece()


@pytest.fixture(scope="module")
def module(tokenizer: PreTrainedTokenizerFast) -> Any:
    return tiny.model("causal", tokenizer)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, module: Any, tokenizer: PreTrainedTokenizerFast
) -> Iterator[ServerProcess]:
    path = tiny.write(tmp_path_factory.mktemp("shepherd"), module, tokenizer)
    models = {
        "math-shepherd": {"path": path, "kind": "process", "format": "math-shepherd"},
        "sums-steps": {"path": "sums-steps"},
        "sums": {"path": "sums"},
    }
    tree = {"models": models, "api_keys": {"tester": KEY}, "allow_open": ["openr"], "aliases": {"prm": "sums-steps"}}
    with ServerProcess(tree) as server:
        server.http.headers["x-api-key"] = KEY
        yield server


def value_inference(model_name: str, input_str: Any, controller_addr: str) -> Any:
    """The requests of openr's reason/inference/value.py."""
    ret = httpx.post(controller_addr + "/get_worker_address", json={"model": model_name})
    worker_addr = ret.json()["address"]
    if not worker_addr:
        raise ValueError(f"Value Model name {model_name} does not exist.")
    headers = {"User-Agent": "FastChat Client"}
    response = httpx.post(worker_addr + "/worker_value_inference", headers=headers, json={"input_str": input_str})
    return response.json()["value"]


def test_step_scores_are_those_of_plain_transformers(
    server: ServerProcess, module: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = f"{QUESTION} " + "\n".join(f"{step} ки" for step in STEPS)
    ids = tokenizer.encode(text)
    good, bad = tokenizer.encode("+ -")[1:]
    positions = [i for i, token in enumerate(ids) if token == tokenizer.encode("ки")[-1]]
    expected = tiny.softmax(tiny.plain(module, ids)[positions][:, [good, bad]])[:, 0].tolist()
    assert value_inference("math-shepherd", text, server.url) == pytest.approx(expected, abs=5e-5)
    shorter = text[: text.index("ки") + 2]
    both = value_inference("math-shepherd", [text, shorter], server.url)
    assert both[0] == pytest.approx(expected, abs=5e-5)
    assert both[1] == pytest.approx(expected[:1], abs=5e-5)
    reply = server.rewards([{"tokens": ids}], "math-shepherd", steps=True).json()
    assert both[0] == pytest.approx(reply["items"][0]["steps"][0], abs=5e-5)


@pytest.mark.parametrize("name", ["sums-steps", "prm"])
def test_every_model_has_its_own_worker_address(server: ServerProcess, name: str) -> None:
    text = "3+4+5=3+4=7;7+5=12;"
    reply = server.rewards([{"text": text}], "sums-steps", steps=True).json()
    assert value_inference(name, text, server.url) == pytest.approx(reply["items"][0]["steps"][0], abs=5e-5)


def test_the_controller_lists_only_its_own_process_models(server: ServerProcess) -> None:
    for name in ("sums", "nobody", ""):
        assert server.http.post("/get_worker_address", json={"model": name}).json() == {"address": ""}
    listed = server.http.post("/list_models").json()["models"]
    assert listed == ["math-shepherd", "sums-steps", "prm", "process_model"]
    status = server.http.post("/openr/sums-steps/worker_get_status").json()
    assert status == {"model_names": ["sums-steps", "prm"], "speed": 1, "queue_length": 0}
    assert "math-shepherd" in server.http.post("/worker_get_status").json()["model_names"]
    for path in ("/register_worker", "/receive_heart_beat"):
        reply = server.http.post(path, json={"worker_name": "http://elsewhere:1"})
        assert reply.status_code == 403
        assert "only its own models" in reply.json()["text"]


def test_the_worker_address_is_that_of_the_connection_not_of_the_host_header(server: ServerProcess) -> None:
    reply = server.http.post("/get_worker_address", json={"model": "sums-steps"}, headers={"host": "evil.example"})
    assert reply.json() == {"address": f"http://127.0.0.1:{server.port}/openr/sums-steps"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/worker_value_inference", {}, "input_str"),
        ("/worker_value_inference", {"input_str": [1]}, "input_str[0]"),
        ("/worker_value_inference", {"input_str": []}, "input_str is an empty list"),
        ("/worker_value_inference", {"input_str": "no tag"}, "'ки'"),
        ("/worker_value_inference", {"input_str": ["a ки", "no tag"]}, "input_str[1]: "),
        ("/worker_value_inference", {"input_str": "a ки " * 600}, "input_str[0]: "),
        ("/get_worker_address", {"model": 3}, "$.model"),
    ],
)
def test_errors_have_fastchats_shape_and_name_the_field(
    server: ServerProcess, path: str, body: Any, message: str
) -> None:
    reply = server.http.post(path, json=body)
    assert reply.status_code == 422, reply.text
    assert set(reply.json()) == {"text", "error_code"}
    assert message in reply.json()["text"]


def test_openr_may_be_open_while_other_routes_need_a_key(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url) as bare:
        assert bare.post("/list_models").status_code == 200
        assert bare.post("/v1/rewards", json={"items": [{"text": "1"}]}).status_code == 401
