"""OpenAI's SDK, sync and async, unchanged. In: url, key, model, tokens, texts. Out: embeddings in its default encoding
(base64) and as floats, the model's card, and the errors it raises."""

import asyncio
import json
import sys

import openai

arguments = json.load(sys.stdin)
client = openai.OpenAI(base_url=f"{arguments['url']}/v1", api_key=arguments["key"], max_retries=0, timeout=60)


def embeddings(content, **options):
    reply = client.embeddings.create(model=arguments["model"], input=content, **options)
    return [entry.embedding for entry in sorted(reply.data, key=lambda entry: entry.index)]


async def asynchronous():
    async with openai.AsyncOpenAI(base_url=f"{arguments['url']}/v1", api_key=arguments["key"], timeout=60) as other:
        requests = [other.embeddings.create(model=arguments["model"], input=text) for text in arguments["texts"]]
        return [reply.data[0].embedding for reply in await asyncio.gather(*requests)]


def refusal(**options):
    try:
        client.embeddings.create(**{"model": arguments["model"], "input": "x", **options})
    except openai.APIStatusError as error:
        return {"class": type(error).__name__, "status": error.status_code, "body": error.body}
    return None


card = next(model for model in client.models.list() if model.id == arguments["model"])
print(json.dumps({
    "tokens": embeddings(arguments["tokens"]),
    "texts": embeddings(arguments["texts"]),
    "floats": embeddings(arguments["texts"], encoding_format="float"),
    "asynchronous": asyncio.run(asynchronous()),
    "card": card.model_dump(),
    "unknown": refusal(model="nobody"),
    "empty": refusal(input=[]),
}))  # fmt: skip
