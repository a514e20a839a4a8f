"""The documentation of the HTTP surface, made from the table of routes."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from plaudit.serve.protocols import native
from plaudit.serve.routes import Route

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
    "RewardRequest": {
        "type": "object", "required": ["items"],
        "properties": {
            "model": {"type": "string", "description": "The first model served, if left out."},
            "items": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Item"}},
            "steps": {"type": "boolean", "default": False, "description": "Step scores of a process model as well."},
            "truncate": {"enum": ["left", "right"], "description": "The side that may be cut."},
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
    for route in routes:
        entry: dict[str, Any] = {"summary": route.summary, "responses": {"200": {"description": "OK"}}}
        if route.access != "open":
            entry["security"] = [{"key": []}]
        if route.path == "/v1/rewards":
            entry["requestBody"] = {"required": True, "content": _content("RewardRequest", native.BINARY)}
            entry["responses"]["200"]["content"] = _content("RewardReply", native.BINARY_REPLY)
            entry["parameters"] = [
                {
                    "name": "X-Deadline",
                    "in": "header",
                    "schema": {"type": "number"},
                    "description": "Seconds from now.",
                },
                {"name": "X-Request-Id", "in": "header", "schema": {"type": "string"}},
            ]
            entry["responses"]["default"] = {"description": "An error", "content": _content("Error")}
        paths.setdefault(route.path, {})[route.method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "Plaudit reward server", "version": version},
        "paths": paths,
        "components": {"schemas": SCHEMAS, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _content(schema: str, binary: bytes | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    if binary is not None:
        content[binary.decode()] = {"schema": {"type": "string", "format": "binary"}}
    return content


def docs_page() -> str:
    """Readable without the internet, so no viewer of somebody else's: the protocol's own words."""
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Plaudit: rewards over HTTP</title>
<link rel="icon" href="data:,">
<style>
  :root {{ color-scheme: light dark }}
  body {{ font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1.5rem;
    color: light-dark(#22201d, #ebe7df); background: light-dark(#fbfaf7, #171614) }}
  h1 {{ font: 600 1.35rem/1.4 ui-serif, Georgia, "Noto Serif", serif }}
  a {{ color: inherit; text-underline-offset: .2em }}
  pre {{ font: .8125rem/1.55 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; padding: 1rem 1.25rem; overflow: auto;
    background: light-dark(#fff, #1e1d1a); border: 1px solid light-dark(#e4e0d8, #34312c); border-radius: 4px }}
</style>
<h1>Rewards over HTTP</h1>
<p>The machine-readable form is at <a href="/openapi.json">/openapi.json</a>; the live page is at <a href="/">/</a>.</p>
<pre>{html.escape(native.__doc__ or "")}</pre>
</html>
"""
