"""huggingface_hub's InferenceClient, sync and async, unchanged, also below /tei. In: url, texts. Out: scores of each
text by both, raw scores, the status of the error for a text that is too long, and those of other tasks."""

import asyncio
import json
import os
import sys

os.environ.pop("HF_HUB_OFFLINE", None)  # with it set, the client makes no requests, not even to this machine

from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, TextGenerationError

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


def refusal(call):
    try:
        call()
    except HfHubHTTPError as error:
        return error.response.status_code
    except TextGenerationError as error:  # another form of the same
        return error.__cause__.response.status_code
    return None


below = InferenceClient(f"{arguments['url']}/tei", token="anything", timeout=60)


print(json.dumps({
    "activated": scores(), "raw": scores(function_to_apply="none"), "asynchronous": asyncio.run(asynchronous()),
    "refused": refusal(lambda: client.text_classification("1" * 2000)),
    "below": [below.text_classification(text, function_to_apply="none")[0].score for text in arguments["texts"]],
    "others": [
        refusal(lambda: below.feature_extraction("7+8=")),
        refusal(lambda: below.text_generation("7+8=", max_new_tokens=3)),
        refusal(lambda: below.zero_shot_classification("7+8=", ["a", "b"])),
        refusal(lambda: below.sentence_similarity("7+8=", other_sentences=["a"])),
    ],
}))  # fmt: skip
