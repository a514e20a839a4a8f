"""verl's reward loop against servers like vLLM's and SGLang's: one session per request, 16 tries, no retry after a 4xx.
Written from its source. In: url, model, texts (rendered, without begin token). Out: scores by route, a refusal."""

import asyncio
import json
import sys

import aiohttp

arguments = json.load(sys.stdin)


async def post(path, payload, tries=16):
    timeout, url = aiohttp.ClientTimeout(total=None), arguments["url"] + path
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
    reply = await post("/classify", {"model": arguments["model"], "input": text, flag: False})
    return reply["data"][-1]["probs"][-1]


async def embed(text):
    reply = await post("/v1/embeddings", {"model": arguments["model"], "input": text})
    return reply["data"][-1]["embedding"][-1]


async def main():
    results = {}
    for flag in ("use_activation", "activation"):
        results[flag] = await asyncio.gather(*(classify(text, flag) for text in arguments["texts"]))
    results["embeddings"] = await asyncio.gather(*map(embed, arguments["texts"]))
    try:
        await classify("1+" * 300, "use_activation")
    except aiohttp.ClientResponseError as error:
        results["refused"] = error.status
    return results


print(json.dumps(asyncio.run(main())))
