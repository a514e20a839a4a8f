"""OpenAI's SDK, sync and async, as it is. In: url, key, model, tokens, texts. Out: embeddings asked for as it does by
itself (base64) and as floats, the models, and the errors it raises."""

import asyncio
import json
import sys

import openai

given = json.load(sys.stdin)
client = openai.OpenAI(base_url=f"{given['url']}/v1", api_key=given["key"], max_retries=0, timeout=60)


def embeddings(content, **options):
    reply = client.embeddings.create(model=given["model"], input=content, **options)
    return [entry.embedding for entry in sorted(reply.data, key=lambda entry: entry.index)]


async def asynchronous():
    async with openai.AsyncOpenAI(base_url=f"{given['url']}/v1", api_key=given["key"], timeout=60) as other:
        asked = [other.embeddings.create(model=given["model"], input=text) for text in given["texts"]]
        return [reply.data[0].embedding for reply in await asyncio.gather(*asked)]


def refusal(**options):
    try:
        client.embeddings.create(**{"model": given["model"], "input": "x", **options})
    except openai.APIStatusError as error:
        return {"class": type(error).__name__, "status": error.status_code, "body": error.body}
    return None


card = next(model for model in client.models.list() if model.id == given["model"])
print(json.dumps({
    "tokens": embeddings(given["tokens"]),
    "texts": embeddings(given["texts"]),
    "floats": embeddings(given["texts"], encoding_format="float"),
    "asynchronous": asyncio.run(asynchronous()),
    "card": card.model_dump(),
    "unknown": refusal(model="nobody"),
    "empty": refusal(input=[]),
}))  # fmt: skip
