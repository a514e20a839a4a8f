"""huggingface_hub's InferenceClient, sync and async, unchanged. In: url, texts. Out: scores of each text by both, raw
scores, and the status of the error for a text that is too long."""

import asyncio
import json
import os
import sys

os.environ.pop("HF_HUB_OFFLINE", None)  # with it set, the client makes no requests, not even to this machine

from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

arguments = json.load(sys.stdin)
client = InferenceClient(arguments["url"], token="anything", timeout=60)


def scores(**options):
    return [
        [{"label": entry.label, "score": entry.score} for entry in client.text_classification(text, **options)]
        for text in arguments["texts"]
    ]


async def asynchronous():
    async with AsyncInferenceClient(arguments["url"], token="anything", timeout=60) as other:
        replies = await asyncio.gather(*(other.text_classification(text) for text in arguments["texts"]))
        return [reply[0].score for reply in replies]


def refusal():
    try:
        client.text_classification("1" * 2000)
    except HfHubHTTPError as error:
        return error.response.status_code
    return None


print(json.dumps({
    "activated": scores(), "raw": scores(function_to_apply="none"), "asynchronous": asyncio.run(asynchronous()),
    "refused": refusal(),
}))  # fmt: skip
