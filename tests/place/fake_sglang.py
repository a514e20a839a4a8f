"""A server with SGLang's HTTP API and a core engine behind it: `python -m tests.place.fake_sglang PORT MODEL`.

Follows SGLang 0.5.10: `entrypoints/http_server.py` (paths, status codes, replies) and `managers/io_struct.py` (request
fields). /generate accepts only the fields that Plaudit sends and rejects others, so that a misspelt field is an error.
Kernels, memory use and speed of the real server are not imitated.

FAKE_SGLANG=ignore-updates   acknowledges new weights and keeps the old ones
FAKE_SGLANG=old-kv           loads new weights and keeps its prefix cache
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from plaudit.core import Engine, SamplingParams
from plaudit.models import load_any

FAULT = os.environ.get("FAKE_SGLANG", "")
FIELDS = {"input_ids", "sampling_params", "return_logprob", "top_logprobs_num", "stream"}
OPTIONS = {
    "temperature", "stop", "stop_token_ids", "ignore_eos", "min_new_tokens", "max_new_tokens", "sampling_seed",
}  # fmt: skip


class Server:
    def __init__(self, model: str) -> None:
        self.path = model
        loaded = load_any(model)
        self.module, self.tokenizer = loaded.module, loaded.tokenizer
        self.engine = Engine(self.module, self.tokenizer)
        self.weight_version = "default"
        self.lock = threading.Lock()
        self.running = threading.Event()
        self.running.set()

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        if unknown := set(body) - FIELDS:
            return 422, {"detail": f"unknown fields {sorted(unknown)}"}
        if body.get("stream"):
            return 422, {"detail": "not recorded"}
        ids, options = body["input_ids"], body["sampling_params"]
        batch = isinstance(ids[0], list)
        if not batch:
            ids, options = [ids], [options]
        self.running.wait()
        try:
            replies = [self._one(i, o, body.get("top_logprobs_num", 0)) for i, o in zip(ids, options, strict=True)]
        except ValueError as error:
            return 400, {"error": {"message": str(error)}}
        return 200, replies if batch else replies[0]

    def _one(self, ids: list[int], options: dict[str, Any], top: int) -> dict[str, Any]:
        if unknown := set(options) - OPTIONS:
            raise ValueError(f"unknown sampling parameters {sorted(unknown)}")
        if max(ids) >= len(self.tokenizer):
            raise ValueError(f"token id {max(ids)} is out of vocabulary")
        params = SamplingParams(
            temperature=options.get("temperature", 1.0), stop=tuple(options.get("stop", ())),
            stop_token_ids=tuple(options.get("stop_token_ids", ())), ignore_eos=options.get("ignore_eos", False),
            min_tokens=options.get("min_new_tokens", 0), max_tokens=options.get("max_new_tokens", 128),
            seed=options.get("sampling_seed", 0),
        )  # fmt: skip
        with self.lock:
            (sample,) = self.engine.generate([ids], [params])
            logprobs = sample.raw_logprobs if params.temperature == 0 else sample.logprobs
            meta: dict[str, Any] = {
                "id": "0", "prompt_tokens": len(ids), "completion_tokens": len(sample.token_ids),
                "weight_version": self.weight_version, "finish_reason": self._reason(sample, params),
                "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, sample.token_ids, strict=True)],
            }  # fmt: skip
            if top:
                meta["output_top_logprobs"] = [self._top([*ids, *sample.token_ids[:i]], top) for i in range(1)]
        return {"text": sample.text, "output_ids": list(sample.token_ids), "meta_info": meta}

    def _top(self, context: list[int], count: int) -> list[list[Any]]:
        columns = list(range(len(self.tokenizer)))
        values = self.engine.score([context], columns=columns, logprobs=True, cache=True)[0]
        return [[float(values[t]), int(t), None] for t in values.argsort()[::-1][:count]]

    @staticmethod
    def _reason(sample: Any, params: SamplingParams) -> dict[str, Any]:
        if sample.finish_reason == "length":
            return {"type": "length", "length": params.max_tokens}
        return {"type": "stop", "matched": sample.token_ids[-1] if sample.token_ids else None}

    def update(self, body: dict[str, Any]) -> tuple[int, Any]:
        files = list(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            return 400, {"success": False, "message": f"no weights in {body['model_path']}", "num_paused_requests": 0}
        with self.lock:
            if FAULT != "ignore-updates":
                self.module.load_state_dict(load_file(files[0]), strict=False)
                if body.get("flush_cache", True) and FAULT != "old-kv":
                    self.engine.new_version()
            self.weight_version = body.get("weight_version") or self.weight_version
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        match method, path:
            case "GET", "/health":
                return 200, None
            case "GET", "/health_generate":
                with self.lock:
                    self.engine.generate([[1]], [SamplingParams(max_tokens=1, seed=0)])
                return 200, None
            case "GET", "/get_model_info":
                return 200, {"model_path": self.path, "is_generation": True, "weight_version": self.weight_version}
            case "POST", "/generate":
                return self.generate(body)
            case "POST", "/update_weights_from_disk":
                return self.update(body)
            case "POST", "/pause_generation":
                if body.get("mode", "abort") not in ("abort", "retract", "in_place"):
                    return 422, {"detail": "mode"}
                self.running.clear()
                return 200, {"message": "Generation paused successfully.", "status": "ok"}
            case "POST", "/continue_generation":
                self.running.set()
                return 200, {"message": "Generation continued successfully.", "status": "ok"}
            case _, "/flush_cache":
                with self.lock:
                    if FAULT != "old-kv":
                        self.engine.new_version()
                return 200, "Cache flushed.\n"
            case "POST", "/release_memory_occupation":
                with self.lock:
                    self.engine.sleep()
                return 200, None
            case "POST", "/resume_memory_occupation":
                with self.lock:
                    self.engine.wake()
                return 200, None
        return 404, {"detail": "Not Found"}


def main(port: int, model: str) -> None:
    server = Server(model)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._do("GET")

        def do_POST(self) -> None:
            self._do("POST")

        def _do(self, method: str) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            status, reply = server.answer(method, self.path, body)
            data = reply.encode() if isinstance(reply, str) else b"" if reply is None else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(reply, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
