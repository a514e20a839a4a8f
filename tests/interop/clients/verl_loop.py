"""verl's reward loop against servers like vLLM's and SGLang's: a session for each request, 16 tries, none after a 4xx.
Written from its source. In: url, model, texts (rendered, without begin token). Out: scores by each route, a refusal."""

import asyncio
import json
import sys

import aiohttp

given = json.load(sys.stdin)


async def post(path, payload, tries=16):
    timeout, url = aiohttp.ClientTimeout(total=None), given["url"] + path
    attempt = 0
    while True:
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=payload) as reply:
                reply.raise_for_status()
                return await reply.json()
        except aiohttp.ClientError as error:
            attempt += 1
            if attempt == tries or 400 <= getattr(error, "status", 0) < 500:
                raise
        await asyncio.sleep(min(2**attempt, 30))


async def classify(text, flag):
    reply = await post("/classify", {"model": given["model"], "input": text, flag: False})
    return reply["data"][-1]["probs"][-1]


async def embed(text):
    reply = await post("/v1/embeddings", {"model": given["model"], "input": text})
    return reply["data"][-1]["embedding"][-1]


async def main():
    found = {}
    for flag in ("use_activation", "activation"):
        found[flag] = await asyncio.gather(*(classify(text, flag) for text in given["texts"]))
    found["embeddings"] = await asyncio.gather(*map(embed, given["texts"]))
    try:
        await classify("1+" * 300, "use_activation")
    except aiohttp.ClientResponseError as error:
        found["refused"] = error.status
    return found


print(json.dumps(asyncio.run(main())))
