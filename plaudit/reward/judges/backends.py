"""Two backends of an LLM judge: an OpenAI-compatible server, or a model run by our engine."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx

from plaudit.config.reward import JudgeTable
from plaudit.errors import ConfigError, PlauditError, RequestError
from plaudit.models import render_chat
from plaudit.records import ItemError, Sample
from plaudit.reward.judges.judge import Conversation, final_answer, generated_answer

if TYPE_CHECKING:
    from plaudit.core import Engine

REPLY_LIMIT = 1 << 22
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0


class HttpAsk:
    """Sends requests only to the configured address: redirects are not followed, proxy variables are ignored."""

    def __init__(self, table: JudgeTable) -> None:
        assert table.url is not None, "the table must have a url"
        self.table = table
        self._url = table.url.rstrip("/") + "/chat/completions"
        headers = {}
        if table.key_env is not None:
            if not os.environ.get(table.key_env):
                raise ConfigError(f"key_env is {table.key_env}, but this environment variable is not set")
            headers["Authorization"] = f"Bearer {os.environ[table.key_env]}"
        limits = httpx.Limits(max_connections=table.concurrency)
        self._client = httpx.Client(headers=headers, limits=limits, follow_redirects=False, trust_env=False)
        self._threads = ThreadPoolExecutor(table.concurrency, thread_name_prefix="judge")

    def __call__(self, conversations: Sequence[Conversation]) -> list[str | ItemError]:
        return list(self._threads.map(self._one, conversations))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _one(self, conversation: Conversation) -> str | ItemError:
        deadline = time.monotonic() + self.table.timeout
        pause = FIRST_PAUSE
        for attempt in range(self.table.retries + 1):
            answer, again = self._attempt(conversation, deadline)
            if not again or attempt == self.table.retries:
                break
            # Jitter, so that requests rejected together are not retried together.
            wait = pause * random.uniform(0.5, 1.5)
            if time.monotonic() + wait >= deadline:
                break
            time.sleep(wait)
            if time.monotonic() >= deadline:
                break  # keep the reason of the last attempt, which is more useful than "timeout"
            pause = min(2 * pause, LONGEST_PAUSE)
        return answer

    def _attempt(self, conversation: Conversation, deadline: float) -> tuple[str | ItemError, bool]:
        """The answer or an error, and whether a retry may help."""
        left = max(deadline - time.monotonic(), 0.001)
        body = {
            "model": self.table.model, "messages": conversation, "temperature": self.table.temperature,
            "max_tokens": self.table.max_tokens, "n": 1, "stream": False,
        }  # fmt: skip
        try:
            with self._client.stream("POST", self._url, json=body, timeout=left) as response:
                content = b""
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > REPLY_LIMIT:
                        return _failed(f"the judge's reply is longer than {REPLY_LIMIT} bytes"), False
                    if time.monotonic() > deadline:
                        return self._late(), False
                status = response.status_code
                if status != 200:
                    return _failed(f"the judge's server replied with status {status}"), status == 429 or status >= 500
                return _answer(content, self.table.max_tokens), False
        except httpx.TimeoutException:
            return self._late(), False
        except (httpx.TransportError, UnicodeEncodeError) as error:
            return _failed(f"cannot connect to the judge's server: {type(error).__name__}"), True
        except httpx.HTTPError as error:
            return _failed(f"the request to the judge failed: {type(error).__name__}"), False

    def _late(self) -> ItemError:
        return ItemError("timeout", f"the judge did not answer within {self.table.timeout:g} s")


def _answer(reply: bytes, max_tokens: int) -> str | ItemError:
    """Only the content counts: thinking in a field of its own (`reasoning_content`, `reasoning`) is never read."""
    try:
        choice: Any = json.loads(reply)["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        text, thought = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _failed("the judge's reply has no choices[0].message")
    if not isinstance(text, str) and (text is not None or (finish == "stop" and not thought)):
        return _failed("the judge's reply has no choices[0].message.content")
    return final_answer(text or "", finish, max_tokens)


class EngineAsk:
    def __init__(self, engine: Engine, tokenizer: Any, table: JudgeTable) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.table = table
        self._lock = threading.Lock()

    def __call__(self, conversations: Sequence[Conversation]) -> list[str | ItemError]:
        prompts = [self._prompt(conversation) for conversation in conversations]
        texts = iter(self._generate([prompt for prompt in prompts if not isinstance(prompt, ItemError)]))
        return [prompt if isinstance(prompt, ItemError) else next(texts) for prompt in prompts]

    def close(self) -> None:
        """The engine's memory is freed with the object."""

    def _prompt(self, conversation: Conversation) -> list[int] | ItemError:
        try:
            return render_chat(self.tokenizer, conversation, add_generation_prompt=True)
        except PlauditError as error:
            return ItemError("bad_messages", str(error))

    def _generate(self, prompts: list[list[int]]) -> list[str | ItemError]:
        from plaudit.core import SamplingParams

        if not prompts:
            return []
        params = SamplingParams(temperature=self.table.temperature, max_tokens=self.table.max_tokens)
        try:
            with self._lock:
                samples = self.engine.generate(prompts, params)
        except RequestError as error:
            if len(prompts) > 1:  # a prompt that is too long must not fail the others
                return [text for prompt in prompts for text in self._generate([prompt])]
            return [_failed(str(error))]
        return [self._answer(*each) for each in zip(prompts, samples, strict=True)]

    def _answer(self, prompt: list[int], sample: Sample) -> str | ItemError:
        if sample.error is not None:
            return _failed(sample.error.message)
        return generated_answer(
            self.tokenizer, prompt, sample.token_ids, sample.text, sample.finish_reason, self.table.max_tokens
        )


def _failed(message: str) -> ItemError:
    return ItemError("judge_failed", message)
