"""A small completion server with the APIs of vLLM and SGLang and our engine behind it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from plaudit.core import Engine, SamplingParams


class CompletionServer:
    """token_ids   whether it returns the ids of the sampled tokens
    fail_after  number of requests after which it answers 503 to all
    longest     longest prompt that it accepts, in tokens
    """

    def __init__(
        self, engine: Engine, *, token_ids: bool = True, fail_after: int | None = None, longest: int = 1000
    ) -> None:
        self.engine, self.token_ids, self.fail_after, self.longest = engine, token_ids, fail_after, longest
        self.requests: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, reply = server.answer(self.path, body)
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            self.requests.append(body)
            if self.fail_after is not None and len(self.requests) > self.fail_after:
                return 503, {"error": {"message": "shutting down"}}
            if "prompt" in body and len(body["prompt"]) > self.longest:
                return 400, {"error": {"message": "too long for this model"}}
            if body.get("temperature") == 0 and body["n"] > 1:  # as vLLM
                return 400, {"error": {"message": "n must be 1 when using greedy sampling"}}
            return 200, self._sglang(body) if path == "/generate" else self._openai(body)

    def _generate(self, prompt: Any, n: int, most: int, temperature: float, stop: list[str], seed: int) -> list[Any]:
        params = SamplingParams(n=n, max_tokens=most, temperature=temperature, stop=tuple(stop), seed=seed)
        ids = (
            prompt if isinstance(prompt, list) else [1, *self.engine.tokenizer.encode(prompt, add_special_tokens=False)]
        )
        return self.engine.generate([ids], params)

    def _text(self, sample: Any) -> str:
        text: str = self.engine.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        return text

    def _openai(self, body: dict[str, Any]) -> Any:
        samples = self._generate(
            body["prompt"], body["n"], body["max_tokens"], body["temperature"], body["stop"], body["seed"]
        )
        choices = []
        for i, sample in enumerate(samples):
            logprobs = {"tokens": [str(t) for t in sample.token_ids], "token_logprobs": list(sample.raw_logprobs)}
            choice = {
                "index": i,
                "text": self._text(sample),
                "finish_reason": sample.finish_reason,
                "logprobs": logprobs,
            }
            choices.append({**choice, "token_ids": list(sample.token_ids)} if self.token_ids else choice)
        return {"choices": choices[::-1]}  # in another order than requested

    def _sglang(self, body: dict[str, Any]) -> Any:
        params = body["sampling_params"]
        samples = self._generate(
            body["input_ids"], params["n"], params["max_new_tokens"], params["temperature"], params["stop"],
            params["sampling_seed"],
        )  # fmt: skip
        outputs = [
            {
                "text": self._text(s),
                "output_ids": list(s.token_ids),
                "meta_info": {"finish_reason": {"type": s.finish_reason}},
            }
            for s in samples
        ]
        return outputs if len(outputs) > 1 else outputs[0]
