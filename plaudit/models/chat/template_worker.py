"""Renders chat templates for `renderer.py`. Imports nothing of Plaudit or transformers.

Each line is JSON: a template with what all conversations after it have in common, or a conversation, of which the first
`shared` messages are those of the conversation before it. Only the latter have a reply.

The environment is the one transformers gives a template: the immutable sandbox, trimmed blocks, loop controls, the
`generation` tag, `tojson`, `raise_exception` and `strftime_now`. Stricter in one thing: touching a forbidden attribute
is an error at once, even where its value would not be used.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30
OUTPUT_LIMIT = 1 << 24


class Generation(Extension):
    """{% generation %} marks the assistant's text for those who want a mask; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class Environment(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__}")


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def new_environment() -> Environment:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


@lru_cache(maxsize=64)
def compiled(template: str) -> Template:
    return new_environment().from_string(template)


def answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        text = compiled(request["template"]).render(
            {"tools": None, "documents": None, **request["variables"], **request["names"]},
            messages=request["messages"], add_generation_prompt=request["add_generation_prompt"],
        )  # fmt: skip
    except SecurityError as error:
        return {"kind": "unsafe", "message": str(error)}
    except TemplateSyntaxError as error:
        return {"kind": "broken", "message": f"{error} (line {error.lineno})"}
    except TemplateError as error:
        return {"kind": "refused", "message": str(error)}
    except MemoryError:
        return {"kind": "broken", "message": f"more than {MEMORY >> 20} MiB of memory used"}
    except Exception as error:
        return {"kind": "broken", "message": f"{type(error).__name__}: {error}"}
    if len(text) > OUTPUT_LIMIT:
        return {"kind": "broken", "message": f"{len(text)} characters rendered, at most {OUTPUT_LIMIT} are allowed"}
    return {"kind": "text", "text": text}


def limit_cpu(seconds: float) -> None:
    """Should the parent die while a template loops, the kernel ends this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = usage.ru_utime + usage.ru_stime
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 2, resource.RLIM_INFINITY))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"kind": "ready"}), flush=True)
    common: dict[str, Any] = {}
    messages: list[Any] = []
    for line in sys.stdin:
        request = json.loads(line)
        if "template" in request:
            common = request
            continue
        messages = [*messages[: request["shared"]], *request["messages"]]
        limit_cpu(common["seconds"])
        print(json.dumps(answer({**common, **request, "messages": messages})), flush=True)


if __name__ == "__main__":
    main()
