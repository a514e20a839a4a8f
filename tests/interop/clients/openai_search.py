"""OpenAI's SDK, unchanged, asks for answers that are searched for. In: url, model, questions, search, clients.
Out: the answers of that many clients at once, one of them as a stream, and the error of a wrong search."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import openai

given = json.load(sys.stdin)
client = openai.OpenAI(base_url=f"{given['url']}/v1", api_key="none", max_retries=0, timeout=300)


def ask(number):
    question = given["questions"][number % len(given["questions"])]
    reply = client.chat.completions.create(
        model=given["model"], messages=[{"role": "user", "content": question}], seed=number,
        extra_body={"search": given["search"]},
    )  # fmt: skip
    usage = reply.usage.model_dump(exclude_none=True)
    return {"content": reply.choices[0].message.content, "usage": usage, "search": reply.search}


def streamed():
    chunks = client.chat.completions.create(
        model=given["model"], messages=[{"role": "user", "content": given["questions"][0]}], seed=0, stream=True,
        extra_body={"search": given["search"]},
    )  # fmt: skip
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def refusal():
    try:
        client.chat.completions.create(
            model=given["model"], messages=[{"role": "user", "content": "1+1="}], extra_body={"search": {"widht": 3}}
        )
    except openai.APIStatusError as error:
        return {"class": type(error).__name__, "status": error.status_code, "message": error.body["message"]}
    return None


with ThreadPoolExecutor(given["clients"]) as threads:
    answers = list(threads.map(ask, range(given["clients"])))
print(json.dumps({"answers": answers, "streamed": streamed(), "refusal": refusal()}))
