"""LangChain's CohereRerank, unchanged. In: url, key, model, query, texts. Out: the texts by score, and the class of the
error without a valid key."""

import json
import sys

from langchain_cohere import CohereRerank
from langchain_core.documents import Document

arguments = json.load(sys.stdin)


def reranker(key):
    return CohereRerank(
        model=arguments["model"], cohere_api_key=key, base_url=arguments["url"], top_n=len(arguments["texts"])
    )


def refusal():
    try:
        reranker("wrong").rerank(arguments["texts"], arguments["query"])
    except Exception as error:
        return type(error).__name__
    return None


documents = [Document(page_content=text) for text in arguments["texts"]]
compressed = reranker(arguments["key"]).compress_documents(documents, arguments["query"])
print(json.dumps({
    "ranks": reranker(arguments["key"]).rerank(arguments["texts"], arguments["query"]),
    "first": reranker(arguments["key"]).rerank(arguments["texts"], arguments["query"], top_n=1),
    "documents": [[each.page_content, each.metadata["relevance_score"]] for each in compressed],
    "refused": refusal(),
}))  # fmt: skip
