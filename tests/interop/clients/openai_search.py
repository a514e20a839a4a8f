"""OpenAI's SDK, unchanged, with searches. In: url, model, questions, search, clients.
Out: the answers of that many concurrent clients, one answer as a stream, and the error of an invalid search."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import openai

arguments = json.load(sys.stdin)
client = openai.OpenAI(base_url=f"{arguments['url']}/v1", api_key="none", max_retries=0, timeout=300)


def complete(number):
    question = arguments["questions"][number % len(arguments["questions"])]
    reply = client.chat.completions.create(
        model=arguments["model"], messages=[{"role": "user", "content": question}], seed=number,
        extra_body={"search": arguments["search"]},
    )  # fmt: skip
    usage = reply.usage.model_dump(exclude_none=True)
    return {"content": reply.choices[0].message.content, "usage": usage, "search": reply.search}


def streamed():
    chunks = client.chat.completions.create(
        model=arguments["model"], messages=[{"role": "user", "content": arguments["questions"][0]}], seed=0,
        stream=True, extra_body={"search": arguments["search"]},
    )  # fmt: skip
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def refusal():
    try:
        client.chat.completions.create(
            model=arguments["model"],
            messages=[{"role": "user", "content": "1+1="}],
            extra_body={"search": {"widht": 3}},
        )
    except openai.APIStatusError as error:
        return {"class": type(error).__name__, "status": error.status_code, "message": error.body["message"]}
    return None


with ThreadPoolExecutor(arguments["clients"]) as threads:
    answers = list(threads.map(complete, range(arguments["clients"])))
print(json.dumps({"answers": answers, "streamed": streamed(), "refusal": refusal()}))
