"""OpenAI's SDK, sync and async, unchanged. In: url, model, messages, prompt. Out: texts and log-probs of a model, with
and without streaming, and the errors it raises."""

import asyncio
import json
import sys

import openai

arguments = json.load(sys.stdin)
client = openai.OpenAI(base_url=f"{arguments['url']}/v1", api_key="any", max_retries=0, timeout=100)
asked = {
    "model": arguments["model"],
    "messages": arguments["messages"],
    "max_completion_tokens": 12,
    "temperature": 0,
}


def streamed():
    text, usage = "", None
    with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
    return {"text": text, "usage": usage.model_dump(exclude_none=True)}


async def asynchronous():
    async with openai.AsyncOpenAI(base_url=f"{arguments['url']}/v1", api_key="any", timeout=100) as other:
        replies = await asyncio.gather(*(other.chat.completions.create(**asked) for _ in range(4)))
        return [reply.choices[0].message.content for reply in replies]


def refusal(**options):
    try:
        client.chat.completions.create(**{**asked, **options})
    except openai.APIStatusError as error:
        return {"class": type(error).__name__, "status": error.status_code, "code": error.code, "param": error.param}
    return None


chat = client.chat.completions.create(**asked, logprobs=True)
completion = client.completions.create(
    model=arguments["model"], prompt=arguments["prompt"], max_tokens=12, temperature=0.9, seed=7, n=2, logprobs=0
)
schema = {"name": "verdict", "schema": {"enum": ["good", "bad"]}}
constrained = client.chat.completions.create(**asked, response_format={"type": "json_schema", "json_schema": schema})
print(json.dumps({
    "text": chat.choices[0].message.content,
    "logprobs": [row.logprob for row in chat.choices[0].logprobs.content],
    "finish": chat.choices[0].finish_reason,
    "usage": chat.usage.model_dump(exclude_none=True),
    "streamed": streamed(),
    "asynchronous": asyncio.run(asynchronous()),
    "samples": [choice.text for choice in completion.choices],
    "sample_logprobs": [choice.logprobs.token_logprobs for choice in completion.choices],
    "models": [model.id for model in client.models.list()],
    "unknown": refusal(model="nobody"),
    "long": refusal(max_completion_tokens=10_000),
    "json": constrained.choices[0].message.content,
    "yaml": refusal(response_format={"type": "yaml"}),
}))  # fmt: skip
