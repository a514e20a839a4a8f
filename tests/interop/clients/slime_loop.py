"""slime's remote_rm: one session for all requests, 64 connections, a timeout of 120 seconds, 10 tries. Written from its
source. In: url, pairs. Out: rewards without and with a reward key."""

import asyncio
import json
import random
import sys

import aiohttp

arguments = json.load(sys.stdin)


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
        bare = await asyncio.gather(*(remote_rm(session, arguments["url"], p, r) for p, r in arguments["pairs"]))
        keyed = await asyncio.gather(
            *(remote_rm(session, arguments["url"] + "?key=reward", p, r) for p, r in arguments["pairs"])
        )
    return {"bare": bare, "keyed": [reply["reward"] for reply in keyed]}


print(json.dumps(asyncio.run(main())))
