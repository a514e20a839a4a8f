"""slime's remote_rm: a session for all, 64 connections, 120 seconds, 10 tries. Written from its source.
In: url, pairs. Out: rewards, and with a key."""

import asyncio
import json
import random
import sys

import aiohttp

given = json.load(sys.stdin)


async def remote_rm(session, url, prompt, response, tries=10):
    payload = {"prompt": prompt, "response": response, "label": None}
    attempt = 0
    while True:
        try:
            async with session.post(url, json=payload) as reply:
                reply.raise_for_status()
                return await reply.json()
        except Exception:
            attempt += 1
            if attempt == tries:
                raise
            await asyncio.sleep(min(2**attempt, 30) + random.random())


async def main():
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64), timeout=timeout) as session:
        bare = await asyncio.gather(*(remote_rm(session, given["url"], p, r) for p, r in given["pairs"]))
        keyed = await asyncio.gather(
            *(remote_rm(session, given["url"] + "?key=reward", p, r) for p, r in given["pairs"])
        )
    return {"bare": bare, "keyed": [reply["reward"] for reply in keyed]}


print(json.dumps(asyncio.run(main())))
