"""Search with real vLLM generating the steps: the core's tree at temperature 0, and its log-probs with sampling.

The server has the embedded policy with heads of 20 dimensions padded with zeros to 32, as vLLM's CPU attention
requires.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from plaudit.config.search import SearchRecipe, load_search
from plaudit.core import Engine
from plaudit.errors import RequestRefused
from plaudit.models import load_any, save
from plaudit.place.engines.vllm_server import MODEL, VllmServer
from plaudit.search.backends.policy import StepRequest
from plaudit.search.backends.remote import RemotePolicy
from plaudit.search.runner import Outcome
from plaudit.search.search import Search
from tests.interop.environments import ROOT
from tests.serve.process import ServerProcess

pytestmark = pytest.mark.interop
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
OPTIONS = ("--enforce-eager", "--max-num-seqs", "32", "--kv-cache-memory-bytes", str(64 << 20))
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
START_SECONDS = 400.0
HEAD = 32
POLICY = load_any("sums-policy")


def widen(directory: Path) -> None:
    """The same model with wider heads: the new dimensions are zero and not rotated, and q compensates for the scale."""
    config = POLICY.module.config
    old = config.head_dim
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in POLICY.module.state_dict().items():
        part = name.split(".")[-2]
        if part in ("q_proj", "k_proj", "v_proj"):
            heads = tensor.view(-1, old, tensor.shape[1]) * ((HEAD / old) ** 0.5 if part == "q_proj" else 1.0)
            tensor = torch.nn.functional.pad(heads, (0, 0, 0, HEAD - old)).flatten(0, 1)
        elif part == "o_proj":
            heads = tensor.view(tensor.shape[0], -1, old)
            tensor = torch.nn.functional.pad(heads, (0, HEAD - old)).flatten(1)
        tensors[name] = tensor
    settings: dict[str, Any] = {**config.to_dict(), "head_dim": HEAD}
    wide = type(POLICY.module)(type(config).from_dict(settings))
    wide.load_state_dict(tensors)
    save(wide, POLICY.tokenizer, directory)
    written = json.loads((directory / "config.json").read_text())
    written["rope_parameters"]["rope_dim"] = old
    (directory / "config.json").write_text(json.dumps(written))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not (ROOT / ".venv-vllm" / ".installed").exists():
        pytest.skip(".venv-vllm is not there: `make interop` makes it, and runs this")
    directory = tmp_path_factory.mktemp("vllm")
    widen(directory / "wide")
    server = VllmServer(
        str(PYTHON), directory / "wide", directory / "log", dtype="float32", options=OPTIONS, environment=ENVIRONMENT
    )
    with server:
        server.wait_ready(START_SECONDS)
        yield server.url


def recipe(method: str, **flags: Any) -> SearchRecipe:
    return load_search(None, {"search.method": method, "search.width": 6, "data.limit": 3, **flags})


def remote(url: str, method: str, **flags: Any) -> SearchRecipe:
    return recipe(method, **{"engine.name": "openai", "engine.url": url, "engine.model": MODEL, **flags})


def searched(settings: SearchRecipe, policy: RemotePolicy | None = None) -> list[Outcome]:
    search = Search(settings, policy=policy, tokenizer=POLICY.tokenizer)
    try:
        return sorted(search.run(search.questions()), key=lambda outcome: outcome.question.index)
    finally:
        search.close()


def nodes(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [(n.parent, n.twin, n.tokens, n.text, n.state) for n in outcome.tree.nodes]


class ByText(RemotePolicy):
    """A server that does not return the sampled tokens."""

    def _openai(self, request: StepRequest) -> dict[str, Any]:
        return {**super()._openai(request), "return_token_ids": False}


@pytest.mark.parametrize("method", ["best-of-n", "ets", "mcts"])
def test_search_at_temperature_zero_equals_the_cores_search(url: str, method: str) -> None:
    greedy: Mapping[str, Any] = {"steps.temperature": 0.0}
    for ours, theirs in zip(searched(recipe(method, **greedy)), searched(remote(url, method, **greedy)), strict=True):
        assert nodes(theirs) == nodes(ours)
        assert any(node.state == "finished" for node in ours.tree.nodes)
        assert (theirs.answer, theirs.right, theirs.stopped) == (ours.answer, ours.right, ours.stopped)
        for name in ("kv_tokens", "kv_peak", "generated", "calls", "scored", "rounds"):
            assert getattr(theirs.driver.costs, name) == getattr(ours.driver.costs, name), name
        logprobs = [node.logprob for node in theirs.tree.nodes[1:]]
        assert logprobs == pytest.approx([node.logprob for node in ours.tree.nodes[1:]], abs=1e-3)


def test_lookahead_equals_the_cores(url: str) -> None:
    flags: Mapping[str, Any] = {"steps.temperature": 0.0, "search.lookahead": 2}
    ours, theirs = searched(recipe("dvts", **flags)), searched(remote(url, "dvts", **flags))
    for our_outcome, their_outcome in zip(ours, theirs, strict=True):
        assert nodes(their_outcome) == nodes(our_outcome)
        assert [n.value for n in their_outcome.tree.nodes] == pytest.approx(
            [n.value for n in our_outcome.tree.nodes], abs=5e-5
        )


def test_sampled_steps_are_complete_and_have_the_cores_log_probs(url: str) -> None:
    core = Engine(POLICY.module, POLICY.tokenizer)
    outcomes = searched(remote(url, "rebase"))
    (stop,) = POLICY.tokenizer.encode(";", add_special_tokens=False)
    assert len({n.tokens for o in outcomes for n in o.tree.nodes}) > 10, "siblings have draws of their own"
    for outcome in outcomes:
        tree = outcome.tree
        assert outcome.stopped == "done"
        for node in tree.nodes[1:]:
            assert POLICY.tokenizer.decode(node.tokens, skip_special_tokens=True) == node.text
            assert node.text.endswith(";") == (node.tokens[-1] == stop), "the delimiter is part of the step"
            if node.state in ("expanded", "pruned"):
                assert node.text.endswith(";")
            elif node.state == "finished":
                assert node.tokens[-1] == POLICY.tokenizer.eos_token_id
            if len(node.tokens):
                path = tree.path_ids(node.id)
                logprobs = core.logprobs([list(path)])[0][-len(node.tokens) :]
                assert node.logprob == pytest.approx(float(np.mean(logprobs)), abs=1e-3)
    again = searched(remote(url, "rebase").model_copy(update={"concurrent": 1}))
    assert [nodes(o) for o in again] == [nodes(o) for o in outcomes], "by seed, whatever is asked beside it"


def test_search_with_a_served_prm_gives_the_same_tree_as_a_local_prm(url: str) -> None:
    with ServerProcess(None, "--model", "sums-steps") as scoring:
        prm = load_search(None, {"search.method": "rebase"}, [f'prm={{url="{scoring.url}"}}']).prm
        alone = remote(url, "rebase").model_copy(update={"prm": prm})
        assert alone.groups == alone.concurrent
        together = searched(alone.model_copy(update={"lanes": 1}))
        assert [nodes(o) for o in searched(alone)] == [nodes(o) for o in together]
    for local, served in zip(searched(remote(url, "rebase")), together, strict=True):
        assert nodes(served) == nodes(local)
        assert [n.score for n in served.tree.nodes] == [
            None if n.score is None else pytest.approx(n.score, abs=5e-5) for n in local.tree.nodes
        ]


def test_server_that_returns_no_tokens_gets_prompts_as_text(url: str) -> None:
    settings = remote(url, "best-of-n", **{"steps.temperature": 0.0})
    by_text = searched(settings, ByText(settings.engine, settings.steps))
    for ours, theirs in zip(searched(recipe("best-of-n", **{"steps.temperature": 0.0})), by_text, strict=True):
        assert [(n.parent, n.text, n.state) for n in theirs.tree.nodes] == [
            (n.parent, n.text, n.state) for n in ours.tree.nodes
        ]
        assert theirs.driver.costs.generated == ours.driver.costs.generated
        assert theirs.driver.costs.calls == ours.driver.costs.calls


def test_path_too_long_for_the_server_is_an_error_of_that_path_only(url: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    prompts = ["7+8+4=", "+".join("7" * 130) + "="]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    flags: Mapping[str, Any] = {"data.path": str(file), "data.limit": 2}
    short, long = searched(remote(url, "best-of-n", **flags))
    assert all(node.error is None or "rejected the request" not in node.error for node in short.tree.nodes)
    assert len(long.tree.nodes) == 7
    for node in long.tree.nodes[1:]:
        assert node.state == "failed"
        assert node.error is not None
        assert "rejected the request: it answered 400" in node.error
    # If no request succeeds, the recipe itself may be wrong, and the error is raised.
    file.write_text(json.dumps({"prompt": prompts[1]}) + "\n")
    with pytest.raises(RequestRefused, match="maximum context length"):
        searched(remote(url, "best-of-n", **{**flags, "data.limit": 1}))
    with pytest.raises(RequestRefused, match="it answered 404"):
        searched(remote(url, "best-of-n", **{"engine.model": "nobody"}))


ASKED: dict[str, dict[str, Any]] = {
    "stop string": {"stop": [";"]},
    "kept stop string": {"stop": ";", "include_stop_str_in_output": True},
    "first of two": {"stop": ["+4", "15;"], "include_stop_str_in_output": True},
    "stop token": {"stop_token_ids": [16]},
    "kept stop token": {"stop_token_ids": [16], "include_stop_str_in_output": True},
    "end token": {},
    "length": {"max_tokens": 3},
    "token ids": {"return_token_ids": True, "logprobs": 1, "return_tokens_as_token_ids": True},
    "echo": {"echo": True, "logprobs": 1, "max_tokens": 4},
    "echo alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "echo of tokens": {"prompt": [1, 11, 14, 12, 15], "echo": True, "logprobs": 2, "max_tokens": 1},
    "prompt's ranks": {"prompt_logprobs": 1, "max_tokens": 2},
    "prompt's own ranks": {"prompt_logprobs": 0, "max_tokens": 2},
    "continued": {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True},
    "no opening": {"add_generation_prompt": False, "return_token_ids": True},
}
CHATS = ("continued", "no opening", "kept stop string", "token ids", "prompt's ranks", "end token")
# Where tokens are named by their ids vLLM's offsets count the characters of these names, ours those of the text; and
# without an opening vLLM gives an answer the role of the last message.
FREE = ("id", "created", "model", "system_fingerprint", "usage", "text_offset", "role")


def alike(theirs: Any, ours: Any, at: str) -> None:
    """The same values for all that vLLM sets; our reply leaves out what it would have as null."""
    if isinstance(theirs, dict):
        for name in theirs.keys() - set(FREE):
            if theirs[name] not in (None, []):
                assert name in ours, f"{at}.{name}"
                alike(theirs[name], ours[name], f"{at}.{name}")
            else:
                assert not ours.get(name), f"{at}.{name}"
    elif isinstance(theirs, list):
        assert len(theirs) == len(ours), at
        for place, (each, other) in enumerate(zip(theirs, ours, strict=True)):
            alike(each, other, f"{at}.{place}")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1e-3), at
    else:
        assert ours == theirs, at


def test_replies_have_vllms_token_ids_stop_reasons_and_ranks(url: str) -> None:
    messages = [{"role": "user", "content": "7+8+4="}, {"role": "assistant", "content": "7+8=1"}]
    wrong: list[str] = []
    with ServerProcess(None, "--model", f"{MODEL}=sums-policy") as server, httpx.Client(timeout=120) as http:
        for name, options in ASKED.items():
            for path in ("/v1/completions", "/v1/chat/completions"):
                chat = path.endswith("chat/completions")
                if (chat and name not in CHATS) or (not chat and name in ("continued", "no opening")):
                    continue
                form: dict[str, Any] = {"messages": messages if name == "continued" else messages[:1]}
                body = {"model": MODEL, "temperature": 0, "max_tokens": 24, **(form if chat else {"prompt": "7+8+4="})}
                body |= {**options, **({"logprobs": True} if chat and "logprobs" in options else {})}
                theirs, ours = (http.post(f"{base}{path}", json=body) for base in (url, server.url))
                assert theirs.status_code == ours.status_code == 200, (name, theirs.text, ours.text)
                try:
                    alike(theirs.json(), ours.json(), f"{name} {path}")
                except AssertionError as error:
                    wrong.append(str(error)[:300])
    assert not wrong, "vLLM and Plaudit:\n" + "\n".join(wrong)
