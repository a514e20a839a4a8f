"""OpenRLHF's two request loops: the current one, one sample per request, and that of releases up to 0.9, a batch in
shards. Written from its source, with its timeouts, retries and pauses. In: urls, texts. Out: rewards of both."""

import asyncio
import json
import sys
import time

import aiohttp
import requests

arguments = json.load(sys.stdin)
urls, texts = arguments["urls"], arguments["texts"]


async def request_api(url, data, tries=5):
    timeout = aiohttp.ClientTimeout(total=180)
    while True:
        tries -= 1
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=data) as response:
                response.raise_for_status()
                return await response.json()
        except Exception:
            if tries == 0:
                raise
            await asyncio.sleep(1)


async def sample(text):
    """With several URLs the query goes to the first and empty lists to the others; all must answer."""
    calls = []
    for number, url in enumerate(urls):
        query = [text] if number == 0 else []
        calls.append(request_api(url, {"query": query, "prompts": query, "labels": query}))
    info = (await asyncio.gather(*calls))[0]
    rewards = info["rewards"]
    return {"reward": rewards[0], "score": info.get("scores", rewards)[0], "logs": info.get("extra_logs", {})}


async def samples():
    return await asyncio.gather(*map(sample, texts))


def post(url, data, tries=5):
    while True:
        tries -= 1
        try:
            response = requests.post(url, json=data, headers={"Content-Type": "application/json"}, timeout=180)
            response.raise_for_status()
            return response.json()
        except requests.RequestException:
            if tries == 0:
                raise
            time.sleep(1)


def shards():
    size = -(-len(texts) // len(urls))
    rewards = []
    for number, url in enumerate(urls):
        shard = texts[number * size : (number + 1) * size]
        reply = post(url, {"query": shard, "prompts": shard, "labels": [None] * len(shard)})
        assert len(reply["rewards"]) == len(shard)
        rewards += reply["rewards"]
    return rewards


print(json.dumps({"samples": asyncio.run(samples()), "shards": shards()}))
