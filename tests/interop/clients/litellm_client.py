"""LiteLLM, unchanged. In: url, key, texts, query. Out: embeddings, a rerank, a chat, and the class of the error without
a valid key."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it fetches its table of prices

import litellm

arguments = json.load(sys.stdin)
url, key = arguments["url"], arguments["key"]


def embeddings(**options):
    reply = litellm.embedding(
        input=arguments["texts"], api_base=f"{url}/v1", **{"model": "openai/sums", "api_key": key, **options}
    )
    return [row["embedding"] for row in reply.data]


def error(call):
    try:
        call()
    except Exception as problem:
        return {"class": type(problem).__name__, "status": getattr(problem, "status_code", None), "text": str(problem)}
    return None


def reranked(**options):
    reply = litellm.rerank(
        model="hosted_vllm/sums", query=arguments["query"], documents=arguments["texts"],
        **{"api_base": url, "api_key": key, **options},
    )  # fmt: skip
    return [[row["index"], row["relevance_score"]] for row in reply.results]


def chat(**options):
    reply = litellm.completion(
        messages=[{"role": "user", "content": arguments["query"]}], max_tokens=24, temperature=0,
        **{"model": f"hosted_vllm/{arguments['writer']}", "api_base": f"{url}/v1", "api_key": key, **options},
    )  # fmt: skip
    return reply.choices[0].message.content


print(json.dumps({
    "embeddings": embeddings(), "hosted": embeddings(model="hosted_vllm/sums"),
    "reranked": reranked(), "first": reranked(top_n=1, return_documents=False),
    "chat": chat(),
    "refused": [
        error(lambda: embeddings(api_key="wrong")),
        error(lambda: chat(api_key="wrong")),
        error(lambda: reranked(api_key="wrong")),
    ],
}))  # fmt: skip
