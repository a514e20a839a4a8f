"""Real vLLM and Plaudit serve the same models: the same status, the same keys and types, the same scores.

vLLM takes most of a minute to start, so two of the four models are compared by default, and all with VLLM_PARITY=all.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, Qwen2Config, Qwen2ForTokenClassification

from tests.interop import vllm_cases
from tests.interop.environments import ROOT
from tests.interop.vllm_cases import Case
from tests.reward import tiny
from tests.serve.mistakes import FORMS, replies_to_mistakes
from tests.serve.process import ServerProcess, free_port

pytestmark = pytest.mark.interop
ENVIRONMENT = ROOT / ".venv-vllm"
START_SECONDS = 400.0
TOLERANCE = 1e-4
POSITIONS = 64
STEP_TAG = "?"
UNEQUAL = ("created", "message", "detail")  # these values may differ; only their types are compared


@dataclass(frozen=True)
class Setting:
    """`options`: vLLM's command-line options; `table`: the model's entry in Plaudit's serve.toml"""

    name: str
    labels: tuple[str, ...]
    cases: list[Case]
    per_token: bool = False
    options: tuple[str, ...] = ()
    table: dict[str, Any] = field(default_factory=dict)


TAG = tiny.llama3().encode(STEP_TAG, add_special_tokens=False)[0]
STEP_FORMAT = {"tag": STEP_TAG, "read": "tag", "end": False, "activation": "softmax"}
SETTINGS = [
    Setting("reward", ("LABEL_0",), vllm_cases.SEQUENCE),
    Setting(
        "steps", ("bad", "fair", "good"), vllm_cases.STEPS, per_token=True,
        options=("--pooler-config", f'{{"pooling_type": "STEP", "step_tag_id": {TAG}}}'),
        table={"kind": "process", "format": STEP_FORMAT},
    ),
    Setting(
        "labels", ("bad", "fair", "good"), [*vllm_cases.CLASSIFY, *vllm_cases.POOLING],
        table={"weights": {"good": 1.0}},
    ),
    Setting("tokens", ("bad", "fair", "good"), vllm_cases.POOLING, per_token=True, table={"kind": "process"}),
]  # fmt: skip
DEFAULT = 2


def write_model(directory: Path, setting: Setting) -> Path:
    tokenizer = tiny.llama3()
    shape = {
        # vLLM's CPU attention requires heads of at least 32 dimensions.
        "vocab_size": len(tokenizer) + len(tokenizer) % 2, "hidden_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64, "initializer_range": 0.25,
        "max_position_embeddings": POSITIONS, "tie_word_embeddings": False, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "id2label": dict(enumerate(setting.labels)),
    }  # fmt: skip
    torch.manual_seed(11)
    model: Any
    if setting.per_token:
        model = Qwen2ForTokenClassification(Qwen2Config(**shape))
    else:
        model = LlamaForSequenceClassification(LlamaConfig(**shape))
    tiny.write(directory, model.eval(), tokenizer)
    return directory


@contextmanager
def vllm_server(path: Path, setting: Setting) -> Iterator[httpx.Client]:
    """Start vLLM without waiting until it is ready."""
    port = free_port()
    command = [
        str(ENVIRONMENT / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(path),
        "--served-model-name", setting.name, "--runner", "pooling", "--dtype", "float32", "--enforce-eager",
        "--host", "127.0.0.1", "--port", str(port), *setting.options,
    ]  # fmt: skip
    variables = {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with (path / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=path, env={**os.environ, **variables}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                yield client
        finally:
            # vLLM has child processes, which a signal to the parent alone may leave behind.
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)


def wait_ready(client: httpx.Client, path: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"vLLM not ready within {START_SECONDS} s:\n{(path / 'vllm.log').read_text()[-3000:]}")


def differences_of(theirs: Any, ours: Any, body: Any, at: str = "") -> list[str]:
    """The differences between two replies, with the values of vLLM and Plaudit."""
    name = at.rpartition(".")[2]
    if type(theirs) is not type(ours):
        return [f"{at}: {theirs!r} and {ours!r}"]
    if isinstance(theirs, dict):
        if set(theirs) != set(ours):
            return [f"{at}: keys {sorted(theirs)} and {sorted(ours)}"]
        return [
            difference for key in theirs for difference in differences_of(theirs[key], ours[key], body, f"{at}.{key}")
        ]
    if isinstance(theirs, list):
        if len(theirs) != len(ours):
            return [f"{at}: {len(theirs)} and {len(ours)} entries"]
        pairs = enumerate(zip(theirs, ours, strict=True))
        return [difference for index, (a, b) in pairs for difference in differences_of(a, b, body, f"{at}.{index}")]
    if isinstance(theirs, float):
        return [] if abs(theirs - ours) <= TOLERANCE else [f"{at}: {theirs} and {ours}"]
    if name == "data" and isinstance(theirs, str):
        return differences_of(decoded(theirs, body), decoded(ours, body), body, f"{at}.base64")
    if name == "id":
        theirs, ours = theirs.partition("-")[0], ours.partition("-")[0]
    if name == "param":  # which of several wrong fields is named depends on the order of validation
        return []
    return [] if name in UNEQUAL or theirs == ours else [f"{at}: {theirs!r} and {ours!r}"]


def decoded(text: str, body: dict[str, Any]) -> list[float]:
    order = {"big": ">"}.get(body.get("endianness", ""), "<")
    number = {"float16": "f2"}.get(body.get("embed_dtype", ""), "f4")
    return np.frombuffer(base64.b64decode(text), order + number).astype(np.float64).tolist()


def answer(client: httpx.Client, case: Case, model: str) -> tuple[int, Any]:
    named = case.model and isinstance(case.body, dict)
    reply = client.post(case.path, json={"model": model, **case.body} if named else case.body)
    try:
        return reply.status_code, reply.json()
    except ValueError:
        return reply.status_code, reply.text


def compared(case: Case, theirs: tuple[int, Any], ours: tuple[int, Any]) -> str:
    """The unexpected result, or "" if the replies agree, or differ as documented."""
    differences = (
        [f"status {theirs[0]} and {ours[0]}"] if theirs[0] != ours[0] else differences_of(theirs[1], ours[1], case.body)
    )
    if case.differs:
        return "" if differences else f"{case.name}: alike, though {case.differs}"
    return f"{case.name}: {'; '.join(differences[:3])}" if differences else ""


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_vllm_and_plaudit_give_the_same_replies(setting: Setting, tmp_path: Path) -> None:
    if not (ENVIRONMENT / ".installed").exists():
        pytest.skip(".venv-vllm is not there: `make interop` creates it")
    if SETTINGS.index(setting) >= DEFAULT and os.environ.get("VLLM_PARITY") != "all":
        pytest.skip("a model more costs a minute: VLLM_PARITY=all compares it too")
    path = write_model(tmp_path / setting.name, setting)
    tree = {"models": {setting.name: {"path": str(path), **setting.table}}}
    with vllm_server(path, setting) as vllm, ServerProcess(tree) as server:
        wait_ready(vllm, path)
        outcomes = [
            compared(case, answer(vllm, case, setting.name), answer(server.http, case, setting.name))
            for case in setting.cases
        ]
        wrong = [outcome for outcome in outcomes if outcome]
        assert not wrong, "vLLM and Plaudit:\n" + "\n".join(wrong)
        check_gets(vllm, server.http)
        check_raw_bodies(vllm, server.http, setting.cases[0].path)
        if setting.name == "reward":
            check_mistakes(vllm, server.http)


def check_gets(vllm: httpx.Client, ours: httpx.Client) -> None:
    theirs, listed = (client.get("/v1/models").json() for client in (vllm, ours))
    assert set(theirs) <= set(listed)
    card, other = theirs["data"][0], listed["data"][0]
    assert all(type(card[key]) is type(other[key]) for key in card), (card, other)
    assert card["id"] == other["id"]
    assert card["max_model_len"] == other["max_model_len"] == POSITIONS
    assert set(card["permission"][0]) == set(other["permission"][0])
    assert vllm.get("/version").json().keys() == ours.get("/version").json().keys()
    assert vllm.get("/health").status_code == ours.get("/health").status_code == 200


def check_raw_bodies(vllm: httpx.Client, ours: httpx.Client, path: str) -> None:
    for content, kind in ((b'{"inp', "application/json"), (b"", "application/json"), (b'{"input":"a"}', "text/plain")):
        replies = [client.post(path, content=content, headers={"content-type": kind}) for client in (vllm, ours)]
        theirs, mine = ((reply.status_code, reply.json()) for reply in replies)
        assert theirs[0] == mine[0] == 400
        assert not differences_of(theirs[1], mine[1], {}), (theirs, mine)


def check_mistakes(vllm: httpx.Client, ours: httpx.Client) -> None:
    """The twelve mistakes of every protocol: status, keys and types, at vLLM's own paths."""
    form = FORMS["vllm"]
    own = replace(form, path="/classify", body={**form.body, "model": "reward"}, long=[vllm_cases.LONG])
    theirs, mine = (
        replies_to_mistakes(vllm, own),
        replies_to_mistakes(ours, replace(own, path="/vllm/classify"), "/vllm"),
    )
    statuses = {mistake: reply.status_code for mistake, reply in theirs.items()}
    assert statuses == {**form.statuses, **form.originally}
    for mistake, reply in theirs.items():
        assert mine[mistake].status_code == form.statuses[mistake], mistake
        assert not differences_of(reply.json(), mine[mistake].json(), own.body), (
            mistake,
            reply.text,
            mine[mistake].text,
        )
