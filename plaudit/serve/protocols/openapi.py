"""The documentation of the HTTP API, generated from the table of routes."""

from __future__ import annotations

import html
import inspect
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from plaudit.serve.http.message import Route
from plaudit.serve.protocols.native import wire as native

REWARDS = "/v1/rewards"
BODIES = {"/admin/swap": "Swap", "/admin/rollback": "Rollback", "/admin/scale": "Scale"}
TITLES = {
    "native": "Plaudit's native protocol", "triton": "Triton, PyTriton, NeMo-Aligner", "openrlhf": "OpenRLHF",
    "slime": "slime", "openr": "OpenR", "sglang": "SGLang, ETS, REBASE",
    "tei": "Text Embeddings Inference, huggingface_hub", "infinity": "Infinity",
    "vllm": "vLLM, OpenAI embeddings, verl", "openai": "OpenAI chat and completions", "nemo-gym": "NeMo Gym",
}  # fmt: skip
WIRES = {  # module of the wire format, if it is not the protocol's `wire`
    "infinity": ("tei.infinity_wire",), "openr": ("openr",), "openrlhf": ("openrlhf:OpenRLHFRoutes",),
    "nemo-gym": ("nemo_gym",), "sglang": ("sglang.wire", "sglang.ets_wire"), "slime": ("openrlhf:SlimeRoutes",),
}  # fmt: skip
WHO = {
    "open": "anyone", "key": "with an API key, if keys are set", "metrics": "with a key for metrics",
    "admin": "with the admin key",
}  # fmt: skip
MESSAGES = {"type": "array", "items": {"$ref": "#/components/schemas/Message"}}
ITEM = {
    "oneOf": [
        {
            "type": "object", "required": ["prompt", "responses"],
            "properties": {
                "prompt": {"oneOf": [{"type": "string"}, MESSAGES]},
                "responses": {
                    "type": "array",
                    "items": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
                },
                "truth": {},
            },
        },
        {
            "type": "object", "required": ["messages"],
            "properties": {"messages": MESSAGES, "truth": {}},
        },
        {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}, "truth": {}}},
        {
            "type": "object", "required": ["tokens"],
            "properties": {"tokens": {"type": "array", "items": {"type": "integer"}}, "truth": {}},
        },
    ]
}  # fmt: skip
ERROR = {
    "type": "object", "required": ["type", "message"],
    "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
}  # fmt: skip
SCHEMAS: dict[str, Any] = {
    "Message": {
        "type": "object", "required": ["role", "content"],
        "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
    },
    "Item": ITEM,
    "Error": ERROR,
    "Swap": {
        "type": "object", "required": ["model", "path"],
        "properties": {
            "model": {"type": "string"},
            "path": {"type": "string", "description": "A directory relative to model_root."},
            "wait": {"type": "boolean", "default": True, "description":
            "false: replies 202 at once, see /admin/swaps."},
        },
    },
    "Rollback": {"type": "object", "required": ["model"], "properties": {"model": {"type": "string"}}},
    "Scale": {
        "type": "object", "required": ["model", "replicas"],
        "properties": {"model": {"type": "string"}, "replicas": {"type": "integer", "minimum": 1, "maximum": 1024}},
    },
    "RewardRequest": {
        "type": "object", "required": ["items"],
        "properties": {
            "model": {"type": "string", "description": "Defaults to the first model."},
            "items": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Item"}},
            "steps": {"type": "boolean", "default": False, "description":
            "Also return step scores of a process model."},
            "truncate": {"enum": ["left", "right"], "description": "The side to truncate."},
            "priority": {"type": "integer", "minimum": -native.PRIORITIES, "maximum": native.PRIORITIES, "default": 0},
            "cache": {"type": "boolean", "default": True},
        },
    },
    "RewardReply": {
        "type": "object", "required": ["model", "version", "items", "usage", "request_id"],
        "properties": {
            "model": {"type": "string"}, "version": {"type": "string"}, "request_id": {"type": "string"},
            "usage": {"type": "object", "additionalProperties": {"type": "integer"}},
            "items": {
                "type": "array",
                "items": {
                    "oneOf": [
                        {
                            "type": "object", "required": ["scores"],
                            "properties": {
                                "scores": {"type": "array", "items": {"type": ["number", "null"]}},
                                "steps": {"type": "array", "items": {"type": ["array", "null"]}},
                                "attributes": {"type": "array", "items": {"type": "object"}},
                                "truncated": {"type": "array", "items": {"type": "boolean"}},
                                "errors": {"type": "array", "items": {"oneOf": [{"type": "null"}, ERROR]}},
                            },
                        },
                        {"type": "object", "required": ["error"], "properties": {"error": ERROR}},
                    ]
                },
            },
        },
    },
}  # fmt: skip


def openapi(routes: Sequence[Route], version: str) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for path, method, shared in _places(routes):
        paths.setdefault(path, {})[method.lower()] = _operation(path, shared)
    names = list(dict.fromkeys(route.protocol for route in routes))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Plaudit reward server", "version": version},
        "tags": [{"name": name, "description": _words(name)} for name in names],
        "paths": paths,
        "components": {"schemas": SCHEMAS, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _places(routes: Sequence[Route]) -> Iterator[tuple[str, str, list[Route]]]:
    """Every path and method once, with the routes that share it."""
    shared: dict[tuple[str, str], list[Route]] = {}
    for route in routes:
        shared.setdefault((route.path, route.method), []).append(route)
    for (path, method), sharing in shared.items():
        yield path, method, sharing


def _operation(path: str, routes: Sequence[Route]) -> dict[str, Any]:
    """The entry of one path and method. Where protocols share it, the body decides between them."""
    last = routes[-1]
    entry: dict[str, Any] = {
        "summary": "; or ".join(dict.fromkeys(route.summary for route in routes)),
        "tags": list(dict.fromkeys(route.protocol for route in routes)),
        "responses": {"200": {"description": "OK"}, "default": {"description": "An error in the protocol's format"}},
    }
    if len(routes) > 1:
        entry["description"] = "Several protocols share this path. The fields of the body select the protocol."
    if last.access != "open":
        entry["security"] = [{"key": []}]
    if path == REWARDS:
        entry["requestBody"] = {"required": True, "content": _content("RewardRequest", native.BINARY)}
        entry["responses"]["200"]["content"] = _content("RewardReply", native.BINARY_REPLY)
        entry["parameters"] = [
            {"name": "X-Deadline", "in": "header", "schema": {"type": "number"}, "description": "Seconds from now."},
            {"name": "X-Request-Id", "in": "header", "schema": {"type": "string"}},
        ]
        entry["responses"]["default"] = {"description": "An error", "content": _content("Error")}
    elif path in BODIES:
        entry["requestBody"] = {"required": True, "content": _content(BODIES[path])}
    elif last.method in ("POST", "PUT"):
        entry["requestBody"] = {"content": {"application/json": {"schema": {"type": "object"}}}}
    return entry


def _content(schema: str, binary: bytes | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    if binary is not None:
        content[binary.decode()] = {"schema": {"type": "string", "format": "binary"}}
    return content


def docs_page(routes: Sequence[Route]) -> str:
    """A page that works offline, without a third-party viewer: every route, and the description of each protocol."""
    by_protocol: dict[str, list[Route]] = {}
    for route in routes:
        by_protocol.setdefault(route.protocol, []).append(route)
    return STYLE + "".join(_section(name, of) for name, of in by_protocol.items()) + "</html>\n"


def _section(protocol: str, routes: Sequence[Route]) -> str:
    rows: dict[tuple[str, str], list[Route]] = {}  # paths with the same routes share one row
    for route in routes:
        rows.setdefault((route.method, route.summary), []).append(route)
    lines = [
        f"<tr><td>{method}</td><td>{'<br>'.join(f'<code>{html.escape(route.path)}</code>' for route in of)}</td>"
        f"<td>{html.escape(summary)}</td><td>{WHO[of[0].access]}</td></tr>"
        for (method, summary), of in rows.items()
    ]
    head = "<tr><th>method</th><th>path</th><th>what it does</th><th>who may call it</th></tr>"
    return (
        f'<h2 id="{protocol}">{TITLES.get(protocol, protocol)}</h2>\n<div><table>{head}{"".join(lines)}</table></div>\n'
        f"<pre>{html.escape(_words(protocol))}</pre>\n"
    )


def _words(protocol: str) -> str:
    """The docstrings of a protocol's modules and classes, which describe its wire format."""
    texts = []
    for home in WIRES.get(protocol, (f"{protocol}.wire",)):
        module, _, name = home.partition(":")
        place = import_module(f"plaudit.serve.protocols.{module}")
        texts.append(inspect.getdoc(getattr(place, name) if name else place) or "")
    return "\n\n".join(texts)


STYLE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Plaudit: rewards over HTTP</title>
<link rel="icon" href="data:,">
<style>
  :root { color-scheme: light dark }
  body { font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1.5rem;
    color: light-dark(#22201d, #ebe7df); background: light-dark(#fbfaf7, #171614) }
  h1, h2 { font: 600 1.35rem/1.4 ui-serif, Georgia, "Noto Serif", serif }
  h2 { font-size: 1.1rem; margin-top: 2.5rem }
  a { color: inherit; text-underline-offset: .2em }
  div { overflow: auto }
  table { border-collapse: collapse; width: 100% }
  th, td { text-align: left; vertical-align: top; padding: .35rem .75rem .35rem 0;
    border-bottom: 1px solid light-dark(#e4e0d8, #34312c) }
  th { font-weight: 600 }
  code { font: .8125rem/1.55 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; white-space: nowrap }
  pre { font: .8125rem/1.55 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; padding: 1rem 1.25rem; overflow: auto;
    background: light-dark(#fff, #1e1d1a); border: 1px solid light-dark(#e4e0d8, #34312c); border-radius: 4px }
</style>
<h1>Rewards over HTTP</h1>
<p>Every route of this server, by protocol. The machine-readable form is at <a href="/openapi.json">/openapi.json</a>;
the live page is at <a href="/">/</a>.</p>
"""
