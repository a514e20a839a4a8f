"""huggingface_hub's InferenceClient, sync and async, as it is. In: url, texts. Out: scores of each text by both, the
raw ones, and what it raises for a text that is too long."""

import asyncio
import json
import os
import sys

os.environ.pop("HF_HUB_OFFLINE", None)  # it would not even talk to this machine

from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

given = json.load(sys.stdin)
client = InferenceClient(given["url"], token="anything", timeout=60)


def scores(**options):
    return [
        [{"label": entry.label, "score": entry.score} for entry in client.text_classification(text, **options)]
        for text in given["texts"]
    ]


async def asynchronous():
    async with AsyncInferenceClient(given["url"], token="anything", timeout=60) as other:
        replies = await asyncio.gather(*(other.text_classification(text) for text in given["texts"]))
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
