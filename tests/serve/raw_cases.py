"""Raw HTTP/1.1 requests by section of RFC 9112 and 9110, each with a verdict derived from the text, an application that
records what a server executes, and the comparison of both. Used by test_raw.py and benchmarks/listeners.py; needs the
standard library alone.

The bytes of a case are followed by a last request, `GET /end`, in the same write: whether it is executed shows where a
server sees the end of what came before.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

# run         executed and answered: the RFC demands it
# refuse      an error reply or a closed connection: the RFC demands it, or it cannot be read as a request
# may run     the RFC permits both; Plaudit's listener runs it
# may refuse  the RFC permits both; Plaudit's listener refuses it
Verdict = Literal["run", "refuse", "may run", "may refuse"]
END = "GET /end"
PROBE = b"GET /end HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
HALF_CLOSED_SECONDS = 0.3


@dataclass(frozen=True)
class Case:
    """section  of RFC 9112, or of RFC 9110 with its number in front
    runs     what is executed if the server runs it: method, target, and the body if there is one
    before   what is executed if the server refuses it
    closes   whether the connection ends with it, so that the last request is not executed; None: either is permitted
    ends     whether the client sends nothing more, not even the last request
    has, lacks  patterns of the whole answer
    deviates  why Plaudit's listener refuses what the RFC demands to run
    """

    section: str
    name: str
    data: bytes
    verdict: Verdict
    runs: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    closes: bool | None = False
    ends: bool = False
    has: bytes = b""
    lacks: bytes = b"$.^"
    deviates: str = ""

    @property
    def id(self) -> str:
        return f"{self.section} {self.name}"


@dataclass(frozen=True)
class Outcome:
    executed: tuple[str, ...]
    statuses: tuple[int, ...]
    closed: bool
    answer: bytes


# Building requests


def head(first: str, *lines: str | bytes, host: str | None = "Host: h") -> bytes:
    every = [first, *([] if host is None else [host]), *lines]
    return b"".join((each if isinstance(each, bytes) else each.encode("latin-1")) + b"\r\n" for each in every) + b"\r\n"


def get(*lines: str | bytes, target: str = "/a", version: str = "HTTP/1.1", host: str | None = "Host: h") -> bytes:
    return head(f"GET {target} {version}", *lines, host=host)


def post(body: bytes, *lines: str | bytes, version: str = "HTTP/1.1", target: str = "/a") -> bytes:
    return head(f"POST {target} {version}", *lines) + body


def sized(body: bytes, *lines: str, version: str = "HTTP/1.1") -> bytes:
    return post(body, *lines, f"Content-Length: {len(body)}", version=version)


def chunked(body: bytes, *lines: str, version: str = "HTTP/1.1") -> bytes:
    """`body`: chunks as they are sent."""
    return post(body, *lines, "Transfer-Encoding: chunked", version=version)


ABC = b"3\r\nabc\r\n0\r\n\r\n"
RAN, RAN_ABC = ("GET /a",), ("POST /a abc",)
MANY = tuple(f"X-{n}: 1" for n in range(120))
OFFER = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")


def table() -> list[Case]:
    return [
        *_messages(),
        *_versions(),
        *_request_lines(),
        *_targets(),
        *_hosts(),
        *_fields(),
        *_codings(),
        *_lengths(),
        *_chunks(),
        *_connections(),
        *_upgrades(),
        *_semantics(),
    ]


def _messages() -> Iterable[Case]:
    def case(name: str, data: bytes, verdict: Verdict, runs: tuple[str, ...] = RAN, **more: Any) -> Case:
        return Case("2.2", name, data, verdict, runs if "run" in verdict or verdict == "may refuse" else (), **more)

    yield case("an empty line before the request", b"\r\n" + get(), "may run")
    yield case("three empty lines before the request", b"\r\n\r\n\r\n" + get(), "may run")
    yield Case("2.2", "an empty line after a body", sized(b"abc") + b"\r\n" + get(), "may run", (*RAN_ABC, *RAN))
    yield case("bare LF ends every line", get().replace(b"\r\n", b"\n"), "may refuse")
    yield case("bare LF ends the request line", get().replace(b"\r\n", b"\n", 1), "may refuse")
    yield case("bare LF ends a header", get("X: a").replace(b"a\r\n", b"a\n"), "may refuse")
    yield case("bare LF ends the head", get()[:-2] + b"\n", "may refuse")
    yield case("bare LF and then CRLF", get("X: a")[:-4] + b"\n\r\n", "may refuse")
    yield case("bare CR in the request line", b"GET /a\rb HTTP/1.1\r\nHost: h\r\n\r\n", "refuse")
    yield case("bare CR ends every line", get().replace(b"\r\n", b"\r"), "refuse")
    yield case("CR CR LF ends a header", get("X: a\r"), "may refuse")
    yield case("a space before the first header", head("GET /a HTTP/1.1", " X: a", "Host: h", host=None), "may refuse")
    yield Case(
        "2.2",
        "a space before Transfer-Encoding as the first header",
        head("POST /a HTTP/1.1", " Transfer-Encoding: chunked", "Host: h", "Content-Length: 0", host=None),
        "may refuse",
        ("POST /a",),
    )
    yield case("NUL in the request line", b"GET /a\0 HTTP/1.1\r\nHost: h\r\n\r\n", "refuse")
    yield case("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40) + b"\r\n\r\n", "refuse")
    yield case("an SSH banner", b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "refuse")
    yield case("a word", b"hello\r\n\r\n", "refuse")
    yield case("HTTP/2's preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "refuse")
    yield case("a reply", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "refuse")
    yield case("a byte order mark", b"\xef\xbb\xbf" + get(), "refuse")
    yield case("UTF-16", get().decode().encode("utf-16"), "refuse")
    yield case("a head without an end", get("X: a")[:-2], "refuse", ends=True)
    yield case("half a request line", b"GET /a HT", "refuse", ends=True)


def _versions() -> Iterable[Case]:
    yield Case("2.3", "HTTP/1.0", get(version="HTTP/1.0"), "run", RAN, closes=True)
    yield Case("2.3", "HTTP/1.0 with a body", sized(b"abc", version="HTTP/1.0"), "run", RAN_ABC, closes=True)
    for version in ("HTTP/1.2", "HTTP/1.9", "HTTP/2.0", "HTTP/3.0", "HTTP/0.9", "HTTP/9.9"):
        yield Case("2.3", version, get(version=version), "may refuse", RAN, closes=None)
    for version in (
        "HTTP/1",
        "HTTP/1.",
        "HTTP/.1",
        "HTTP/1.10",
        "HTTP/1.01",
        "HTTP/01.1",
        "HTTP/11.1",
        "HTTP/1.1.1",
        "HTTP/1,1",
        "HTTP/+1.1",
        "HTTP/-1.1",
        "HTTP/1.x",
        "http/1.1",
        "Http/1.1",
        "HTTP /1.1",
        "HTTP/ 1.1",
        "HTTPS/1.1",
        "RTSP/1.0",
        "ICE/1.0",
        "HTTP/1.1x",
        "HTTP",
        "HTTP/",
        "FTP/1.1",
        "HTTP\\1.1",
    ):
        yield Case("2.3", f"version {version!r}", get(version=version), "refuse")


def _request_lines() -> Iterable[Case]:
    def line(text: str, rest: bytes = b"\r\nHost: h\r\n\r\n") -> bytes:
        return text.encode("latin-1") + rest

    for name, text in {
        "two spaces before the target": "GET  /a HTTP/1.1",
        "two spaces before the version": "GET /a  HTTP/1.1",
        "a tab before the target": "GET\t/a HTTP/1.1",
        "a tab before the version": "GET /a\tHTTP/1.1",
        "a vertical tab": "GET\x0b/a HTTP/1.1",
        "a form feed": "GET /a\x0cHTTP/1.1",
        "a space at the end": "GET /a HTTP/1.1 ",
        "a space at the beginning": " GET /a HTTP/1.1",
    }.items():
        yield Case("3", name, line(text), "may refuse", RAN)
    for name, text in {
        "no target": "GET HTTP/1.1",
        "an empty target": "GET  HTTP/1.1",
        "only a method": "GET",
        "no method": "/a HTTP/1.1",
        "a space in the target": "GET /a b HTTP/1.1",
        "four words": "GET /a HTTP/1.1 HTTP/1.1",
        "a line of spaces": "   ",
    }.items():
        yield Case("3", name, line(text), "refuse")
    yield Case("3", "no version", line("GET /a"), "may refuse", RAN, closes=None)
    yield Case("3", "no version and no headers", b"GET /a\r\n\r\n", "may refuse", RAN, closes=None)
    yield Case("3", "a line of 8,000 bytes", get(target="/" + "a" * 7985), "run", ("GET /" + "a" * 7985,))
    yield Case(
        "3", "a target of 200,000 bytes", get(target="/" + "a" * 200_000), "may refuse", ("GET /" + "a" * 200_000,)
    )
    yield Case(
        "3", "a method of 200,000 bytes", head("G" * 200_000 + " /a HTTP/1.1"), "may refuse", ("G" * 200_000 + " /a",)
    )
    for method in ("GET", "PUT", "POST", "DELETE", "OPTIONS", "PATCH", "TRACE"):
        yield Case("3.1", method, head(f"{method} /a HTTP/1.1"), "run", (f"{method} /a",))
    yield Case("3.1", "HEAD", head("HEAD /a HTTP/1.1"), "run", ("HEAD /a",), lacks=rb"HEAD /a")
    for method in ("get", "Get", "FOO", "GET-IT", "M!#$%&'*+.^_`|~1"):
        yield Case("3.1", f"the method {method}", head(f"{method} /a HTTP/1.1"), "may refuse", (f"{method} /a",))
    for method in ("GE(T", "GE@T", "GET:", "G\xc9T", "GET,", 'G"T', "G/T", "G\x7fT", "G\0T", "{GET}"):
        yield Case("3.1", f"the method {method!r}", head(f"{method} /a HTTP/1.1"), "refuse")


def _targets() -> Iterable[Case]:
    for target in (
        "/",
        "/a?b=c",
        "/a?b?c",
        "//a",
        "/a/../b",
        "/a;b",
        "/a:b@c",
        "/.",
        "/a%41",
        "/a%2fb",
        "/a,b",
        "/~a",
        "/a?b=/../c",
    ):
        yield Case("3.2.1", f"origin-form {target}", get(target=target), "run", (f"GET {target}",))
    for target in ("/a|b", '/a"b', "/a\\b", "/a^b", "/a{b}", "/a<b>", "/a`b", "/a%zz", "/a%", "/a%00", "/[a]"):
        yield Case("3.2.1", f"origin-form {target}", get(target=target), "may run", (f"GET {target}",))
    for target in ("/a#b", "/a\x80", "/a\xff"):
        yield Case(
            "3.2.1", f"target {target!r}", get(target=target), "may refuse", (f"GET {target.partition('#')[0]}",)
        )
    for target in ("/a\x01b", "/a\x7fb", "/\x1b[0m", "a", "a/b", "?a", "#a", "../a", "\\a", "%2fa", "a:80", "h:80"):
        yield Case("3.2", f"target {target!r}", get(target=target), "refuse")
    for target, ran in {
        "http://h/a": "/a",
        "HTTP://H/a": "/a",
        "http://h:80/a?b": "/a?b",
        "http://h": "/",
        "http://[::1]/a": "/a",
        "http://other/a": "/a",
    }.items():
        yield Case("3.2.2", f"absolute-form {target}", get(target=target), "run", (f"GET {ran}",))
    yield Case("3.2.2", "absolute-form https://h/a", get(target="https://h/a"), "may run", RAN)
    yield Case("3.2.2", "absolute-form http://h?b", get(target="http://h?b"), "may run", ("GET /?b",))
    for target in ("ftp://h/a", "http://u:p@h/a", "http://h@other/a", "file:///a", "urn:a", "ws://h/a"):
        yield Case("3.2.2", f"absolute-form {target}", get(target=target), "may refuse", RAN)
    for target in ("http:///a", "http://", "http:/a", "http:a", "://h/a", "http//h/a"):
        yield Case("3.2.2", f"absolute-form {target}", get(target=target), "refuse")
    yield Case("3.2.3", "CONNECT", head("CONNECT h:80 HTTP/1.1"), "may refuse", ("CONNECT h:80",))
    yield Case("3.2.3", "CONNECT with a path", head("CONNECT /a HTTP/1.1"), "refuse")
    yield Case(
        "3.2.3",
        "CONNECT with a body",
        head("CONNECT h:80 HTTP/1.1", f"Content-Length: {len(SMUGGLED)}") + SMUGGLED,
        "may refuse",
        (f"CONNECT h:80 {SMUGGLED.decode()}",),
    )
    yield Case("3.2.4", "OPTIONS *", head("OPTIONS * HTTP/1.1"), "run", ("OPTIONS *",))
    for method in ("GET", "POST"):
        yield Case("3.2.4", f"{method} *", head(f"{method} * HTTP/1.1"), "refuse")
    yield Case("3.2.4", "OPTIONS **", head("OPTIONS ** HTTP/1.1"), "refuse")


def _hosts() -> Iterable[Case]:
    for value in ("h", "h:8080", "h:", "127.0.0.1", "[::1]", "[::1]:80", "a_b", "a-b.c.", "%41", "xn--mnchen-3ya.de"):
        yield Case("3.2", f"Host {value!r}", get(host=f"Host: {value}"), "run", RAN)
    yield Case("3.2", "an empty Host", get(host="Host:"), "run", RAN)
    yield Case("3.2", "HOST", get(host="HOST: h"), "run", RAN)
    yield Case("3.2", "no Host", get(host=None), "refuse")
    yield Case("3.2", "no Host, absolute-form", get(target="http://h/a", host=None), "refuse")
    yield Case("3.2", "no Host, HTTP/1.0", get(version="HTTP/1.0", host=None), "run", RAN, closes=True)
    yield Case("3.2", "Host twice", get("Host: h"), "refuse")
    yield Case("3.2", "two Hosts", get("Host: other"), "refuse")
    yield Case("3.2", "two Hosts, the second in lower case", get("host: other"), "refuse")
    yield Case("3.2", "two Hosts far apart", get(*MANY[:50], "Host: other"), "refuse")
    yield Case("3.2", "two Hosts, HTTP/1.0", get("Host: h", version="HTTP/1.0"), "refuse")
    yield Case("3.2", "two Hosts behind another request", get() + get("Host: x"), "refuse", before=RAN)
    for value in (
        "a b",
        "a/b",
        "a?b",
        "a#b",
        "a@b",
        "u:p@h",
        "a:b",
        "[::1",
        "::1",
        '"a"',
        "a:80:80",
        "h\x80",
        "a\\b",
        "a, b",
        "http://h",
        "<h>",
        "h:80 ",
        "{h}",
        "h:-1",
    ):
        if value == "h:80 ":
            yield Case("5.1", "spaces after the Host", get(host=f"Host: {value}"), "run", RAN)
        else:
            yield Case("3.2", f"Host {value!r}", get(host=f"Host: {value}"), "refuse")


def _fields() -> Iterable[Case]:
    for line in ("X : a", "X\t: a", "Host : h", "X  : a"):
        yield Case("5.1", f"whitespace before the colon: {line!r}", get(line), "refuse")
    yield Case("5.1", "Content-Length and a space", post(b"abc", "Content-Length : 3"), "refuse")
    yield Case("5.1", "Transfer-Encoding and a space", post(ABC, "Transfer-Encoding : chunked"), "refuse")
    yield Case(
        "5.1",
        "Transfer-Encoding and a tab beside Content-Length",
        post(ABC, "Transfer-Encoding\t: chunked", f"Content-Length: {len(ABC)}"),
        "refuse",
    )
    for line in ("X:a", "X:  a", "X:\ta\t", "X: a b\tc", "X:", "X:   ", "X: a:b", "X: \xff\xfe", "x-y.z: a"):
        yield Case("5.1", f"a header {line!r}", get(line), "run", RAN)
    yield Case("5.1", "every character of a token", get("!#$%&'*+-.^_`|~09AZaz: a"), "run", RAN)
    for line in ("X: a\r\n b", "X: a\r\n\tb", "X: a\r\n \r\n b"):
        yield Case("5.2", f"a folded header {line!r}", get(line), "may refuse", RAN)
    yield Case("5.2", "a folded Content-Length", post(b"abc", "Content-Length:\r\n 3"), "may refuse", RAN_ABC)
    yield Case("5.2", "a folded Transfer-Encoding", post(ABC, "Transfer-Encoding:\r\n chunked"), "may refuse", RAN_ABC)
    yield Case("5.2", "a folded Host", get(host="Host:\r\n h"), "may refuse", RAN)
    for line in (": a", "X", "X a", "Content-Length", "=a", "\x00"):
        yield Case("5", f"a line {line!r}", get(line), "refuse")
    for letter in '(),/;<=>?@[\\]{}" \x01\x7f\x80\x00\x0b':
        yield Case("9110-5.1", f"{letter!r} in a name", get(f"X{letter}Y: a"), "refuse")
    for letter in "\0\r\n\x01\x08\x0b\x0c\x1b\x1f\x7f":
        verdict: Verdict = "refuse" if letter == "\n" else "may refuse"
        yield Case("9110-5.5", f"{letter!r} in a value", get(f"X: a{letter}b"), verdict, () if letter == "\n" else RAN)
    yield Case("9110-5.4", "99 headers", get(*MANY[:98]), "may run", RAN)
    yield Case("9110-5.4", "120 headers", get(*MANY), "may refuse", RAN)
    yield Case("9110-5.4", "5,000 headers", get(*(f"X-{n}: 1" for n in range(5000))), "may refuse", RAN)
    yield Case("9110-5.4", "a header of 8,000 bytes", get("X: " + "a" * 8000), "may run", RAN)
    yield Case("9110-5.4", "a header of 500,000 bytes", get("X: " + "a" * 500_000), "may refuse", RAN)
    yield Case("9110-5.4", "a name of 500,000 bytes", get("X" * 500_000 + ": a"), "may refuse", RAN)
    yield Case("9110-5.3", "a repeated header", get("X: a", "X: b"), "run", RAN)


def _codings() -> Iterable[Case]:
    for value in ("chunked", "Chunked", "CHUNKED", "chunked ", "\tchunked"):
        yield Case("6.1", f"coding {value!r}", post(ABC, f"Transfer-Encoding: {value}"), "run", RAN_ABC)
    strict = "httptools takes no tab behind the coding; no client sends one"
    yield Case("6.1", "chunked and a tab", post(ABC, "Transfer-Encoding: chunked\t"), "run", RAN_ABC, deviates=strict)
    yield Case("6.1", "transfer-encoding in lower case", post(ABC, "transfer-encoding: chunked"), "run", RAN_ABC)
    for value in ("gzip, chunked", "identity, chunked", "deflate,chunked", ",chunked", "chunked,", "chunked ,"):
        yield Case("6.1", f"coding {value!r}", post(ABC, f"Transfer-Encoding: {value}"), "may refuse", RAN_ABC)
    for value in (
        "chunked, gzip",
        "chunked, chunked",
        "gzip",
        "identity",
        "chunked, identity",
        "xchunked",
        "chunkedx",
        "chunked;q=1",
        "chunked;",
        '"chunked"',
        "\x0bchunked",
        "chunked\x0b",
        "chun ked",
        ",",
        "",
        "chunked, x",
        "chunked\x00",
        "\x0cchunked",
        "chunked\xa0",
        "c\u212aunked".encode().decode("latin-1"),
        "[chunked]",
        "chunked=",
        "'chunked'",
    ):
        yield Case("6.1", f"coding {value!r}", post(ABC, f"Transfer-Encoding: {value}"), "refuse")
    for first, second in (("chunked", "chunked"), ("chunked", "identity"), ("chunked", "gzip"), ("chunked", "x")):
        lines = f"Transfer-Encoding: {first}", f"Transfer-Encoding: {second}"
        yield Case("6.1", f"coding {first} and then {second}", post(ABC, *lines), "refuse")
    lines = "Transfer-Encoding: gzip", "Transfer-Encoding: chunked"
    yield Case("6.1", "coding gzip and then chunked", post(ABC, *lines), "may refuse", RAN_ABC)
    length = f"Content-Length: {len(ABC)}"
    for name, both in {
        "Content-Length before": (length, "Transfer-Encoding: chunked"),
        "Content-Length behind": ("Transfer-Encoding: chunked", length),
        "Content-Length 0": ("Content-Length: 0", "Transfer-Encoding: chunked"),
        "Content-Length 3": ("Transfer-Encoding: chunked", "Content-Length: 3"),
    }.items():
        yield Case("6.1", f"chunked and {name}", post(ABC, *both), "may refuse", RAN_ABC, closes=True)
    for coding in ("xchunked", "identity", "chunked, identity", "gzip"):
        yield Case("6.1", f"{coding} and Content-Length", post(ABC, length, f"Transfer-Encoding: {coding}"), "refuse")
    yield Case("6.1", "chunked in HTTP/1.0", chunked(ABC, version="HTTP/1.0"), "may refuse", RAN_ABC, closes=True)
    both = ("Connection: keep-alive", "Transfer-Encoding: chunked")
    yield Case(
        "6.1",
        "chunked in HTTP/1.0 with keep-alive",
        post(ABC, *both, version="HTTP/1.0"),
        "may refuse",
        RAN_ABC,
        closes=True,
    )
    lines = "Transfer_Encoding: chunked", f"Content-Length: {len(ABC)}"
    yield Case("6.1", "Transfer_Encoding is another header", post(ABC, *lines), "run", (f"POST /a {ABC.decode()}",))
    lines = "X-Transfer-Encoding: chunked", "Content-Length: 3"
    yield Case("6.1", "X-Transfer-Encoding is another header", post(b"abc", *lines), "run", RAN_ABC)
    yield Case("6.1", "TE is another header", post(b"abc", "TE: chunked", "Content-Length: 3"), "run", RAN_ABC)
    yield Case("6.1", "GET with chunks", get("Transfer-Encoding: chunked") + ABC, "run", ("GET /a abc",))
    yield Case(
        "6.1",
        "a stream as reply to HTTP/1.0",
        get(target="/stream", version="HTTP/1.0"),
        "run",
        ("GET /stream",),
        closes=True,
        has=rb"\r\n\r\npart onepart two$",
        lacks=rb"(?i)transfer-encoding",
    )
    yield Case(
        "6.1",
        "a stream as reply to HTTP/1.1",
        get(target="/stream"),
        "run",
        ("GET /stream",),
        has=rb"(?i)transfer-encoding: chunked(?s:.*)8\r\npart one\r\n8\r\npart two\r\n0\r\n\r\n",
    )


def _lengths() -> Iterable[Case]:
    def length(value: str) -> bytes:
        return post(b"abc", f"Content-Length: {value}")

    for value in ("3", "03", "3 ", "\t3"):
        yield Case("6.2", f"Content-Length {value!r}", length(value), "run", RAN_ABC)
    yield Case("6.2", "content-length in lower case", post(b"abc", "content-length: 3"), "run", RAN_ABC)
    yield Case("6.2", "thirty zeros before the length", length("0" * 30 + "3"), "may run", RAN_ABC)
    yield Case("6.2", "Content-Length '3, 3'", length("3, 3"), "may refuse", RAN_ABC)
    yield Case("6.2", "Content-Length twice", post(b"abc", *["Content-Length: 3"] * 2), "may refuse", RAN_ABC)
    for value in (
        "+3",
        "-3",
        "3.0",
        "3e0",
        "0x3",
        "3 3",
        "3,4",
        "",
        " ",
        "3;",
        "3_0",
        "\xb3",
        "three",
        "3a",
        "a3",
        "0b11",
        "3\x0b",
        "\x0c3",
        "'3'",
        "3\x00",
        str(2**64),
        str(2**64 + 3),
        "9" * 40,
        "-0",
        "- 3",
        "1e400",
        "\u0663".encode().decode("latin-1"),
        ",3",
        "3,",
    ):
        yield Case("6.2", f"Content-Length {value!r}", length(value), "refuse")
    for first, second in (("3", "4"), ("3", "0"), ("0", "3"), ("3", ""), ("3", "x"), ("3", "+3")):
        lines = f"Content-Length: {first}", f"Content-Length: {second}"
        yield Case("6.2", f"Content-Length {first!r} and {second!r}", post(b"abc", *lines), "refuse")
    lines = "Content_Length: 40", "Content-Length: 3"
    yield Case("6.2", "Content_Length is another header", post(b"abc", *lines), "run", RAN_ABC)
    yield Case("6.3", "POST without a length", post(b""), "run", ("POST /a",))
    yield Case("6.3", "POST of length 0", sized(b""), "run", ("POST /a",))
    yield Case("6.3", "GET with a body", get("Content-Length: 3") + b"abc", "run", ("GET /a abc",))
    yield Case(
        "6.3", "HEAD with a body", head("HEAD /a HTTP/1.1", "Content-Length: 3") + b"abc", "run", ("HEAD /a abc",)
    )
    yield Case(
        "6.3", "DELETE with a body", head("DELETE /a HTTP/1.1", "Content-Length: 3") + b"abc", "run", ("DELETE /a abc",)
    )
    yield Case(
        "6.3",
        "TRACE with a body",
        head("TRACE /a HTTP/1.1", "Content-Length: 3") + b"abc",
        "may run",
        ("TRACE /a abc",),
    )
    yield Case("6.3", "a body that is a request", sized(SMUGGLED), "run", (f"POST /a {SMUGGLED.decode()}",))
    yield Case("6.3", "a body of empty lines", sized(b"\r\n\r\n\r\n"), "run", ("POST /a \r\n\r\n\r\n",))
    yield Case("6.3", "a body of 300,000 bytes", sized(b"a" * 300_000), "run", ("POST /a " + "a" * 300_000,))
    yield Case("6.3", "more than the length", sized(b"abc") + b"def", "refuse", before=RAN_ABC)
    yield Case("8", "less than the length", post(b"ab", "Content-Length: 3"), "refuse", ends=True)
    yield Case("8", "nothing of the length", post(b"", "Content-Length: 3"), "refuse", ends=True)


def _chunks() -> Iterable[Case]:
    for name, body in {
        "one chunk": ABC,
        "three chunks": b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n",
        "zeros before the size": b"0003\r\nabc\r\n0\r\n\r\n",
        "zeros as the last size": b"3\r\nabc\r\n000\r\n\r\n",
        "an extension": b"3;a=b\r\nabc\r\n0\r\n\r\n",
        "an extension without value": b"3;a\r\nabc\r\n0\r\n\r\n",
        "a quoted extension": b'3;a="b;c"\r\nabc\r\n0\r\n\r\n',
        "two extensions": b"3;a=b;c=d\r\nabc\r\n0;e\r\n\r\n",
        "a trailer": b"3\r\nabc\r\n0\r\nX: a\r\n\r\n",
        "two trailers": b"3\r\nabc\r\n0\r\nX: a\r\nY: b\r\n\r\n",
        "Host as a trailer": b"3\r\nabc\r\n0\r\nHost: other\r\n\r\n",
        "Connection as a trailer": b"3\r\nabc\r\n0\r\nX: close\r\n\r\n",
    }.items():
        yield Case("7.1", name, chunked(body), "run", RAN_ABC)
    long = b"a" * 26
    for size in (b"1A", b"1a", b"0000001a"):
        yield Case(
            "7.1",
            f"the size {size.decode()}",
            chunked(size + b"\r\n" + long + b"\r\n0\r\n\r\n"),
            "run",
            ("POST /a " + "a" * 26,),
        )
    yield Case("7.1", "no chunk", chunked(b"0\r\n\r\n"), "run", ("POST /a",))
    yield Case(
        "7.1", "300 chunks of a byte", chunked(b"1\r\na\r\n" * 300 + b"0\r\n\r\n"), "run", ("POST /a " + "a" * 300,)
    )
    yield Case(
        "7.1",
        "20,000 chunks of a byte",
        chunked(b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n"),
        "run",
        ("POST /a " + "a" * 20_000,),
    )
    for inner in (b"\r\n\r\n", b"0\r\n\r\n", b"\r\n0\r\n\r\n", SMUGGLED, b"\r\n", b"0\r\n\r\n" + SMUGGLED):
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)
        yield Case(
            "7.1",
            f"a chunk that is {inner[:16]!r}, {len(inner)} bytes",
            chunked(body),
            "run",
            (f"POST /a {inner.decode()}",),
        )
    for size in (
        b"",
        b"-3",
        b"+3",
        b"0x3",
        b"3h",
        b"g",
        b"3.0",
        b"3 3",
        b"3,",
        b"F" * 17,
        b"10000000000000003",
        b"\x003",
        b"'3'",
        b"_3",
        b"3_",
        b"\xef\xbc\x93",
        b" 3",
        b"\r\n3",
        b"\t3",
    ):
        yield Case("7.1", f"the size {size!r}", chunked(size + b"\r\nabc\r\n0\r\n\r\n"), "refuse")
    for size in (b"8000000000000000", b"FFFFFFFFFFFFFFFF", b"7FFFFFFFFFFFFFFF"):
        yield Case("7.1", f"the size {size!r}", chunked(size + b"\r\nabc\r\n0\r\n\r\n"), "refuse", ends=True)
    for size in (b"3 ", b"3\t", b"3 ;a", b"3; a", b"3;a = b", b"3;"):
        yield Case("7.1.1", f"the size {size!r}", chunked(size + b"\r\nabc\r\n0\r\n\r\n"), "may refuse", RAN_ABC)
    for name, body in {
        "bare LF after the size": b"3\nabc\r\n0\r\n\r\n",
        "bare LF after an extension": b"3;a\nabc\r\n0\r\n\r\n",
        "bare CR after the size": b"3\rabc\r\n0\r\n\r\n",
        "CR CR LF after the size": b"3\r\r\nabc\r\n0\r\n\r\n",
        "bare LF after the data": b"3\r\nabc\n0\r\n\r\n",
        "bare CR after the data": b"3\r\nabc\r0\r\n\r\n",
        "nothing after the data": b"3\r\nabc0\r\n\r\n",
        "a byte too many": b"3\r\nabcd\r\n0\r\n\r\n",
        "a byte too few": b"3\r\nab\r\n0\r\n\r\n",
        "two bytes in place of CRLF": b"3\r\nabcXX0\r\n\r\n",
        "bare LF after the last size": b"3\r\nabc\r\n0\n\r\n",
        "bare LF at the end": b"3\r\nabc\r\n0\r\n\n",
        "LF LF at the end": b"3\r\nabc\r\n0\n\n",
        "a last chunk with data": b"3\r\nabc\r\n0\r\nabc\r\n\r\n",
        "LF in an extension": b"3;a\nb\r\nabc\r\n0\r\n\r\n",
        "NUL in an extension": b"3;a\0b\r\nabc\r\n0\r\n\r\n",
        "CR in an extension": b"3;a\rb\r\nabc\r\n0\r\n\r\n",
        "CRLF in a quoted extension": b'3;a="\r\n"\r\nabc\r\n0\r\n\r\n',
    }.items():
        yield Case("7.1", name, chunked(body), "refuse")
    for name, trailer in {
        "a space before the colon": b"X : a",
        "no colon": b"X",
        "an empty name": b": a",
        "NUL in the name": b"X\0: a",
        "a request line": b"GET /smuggled HTTP/1.1",
        "parentheses in the name": b"X(): a",
    }.items():
        yield Case("7.1.2", f"a trailer with {name}", chunked(b"3\r\nabc\r\n0\r\n" + trailer + b"\r\n\r\n"), "refuse")
    for name, trailer in {
        "a fold": b"X: a\r\n b",
        "NUL in the value": b"X: a\0b",
        "500,000 bytes": b"X: " + b"a" * 500_000,
        "bare LF": b"X: a\nY: b",
    }.items():
        body = b"3\r\nabc\r\n0\r\n" + trailer + b"\r\n\r\n"
        yield Case("7.1.2", f"a trailer with {name}", chunked(body), "may refuse", RAN_ABC)
    for trailer in (b"Content-Length: 9", b"Transfer-Encoding: chunked"):  # RFC 9110, 6.5.1: must not be sent
        body = b"3\r\nabc\r\n0\r\n" + trailer + b"\r\n\r\n"
        yield Case("7.1.2", f"a trailer {trailer.decode()}", chunked(body), "may refuse", RAN_ABC)
    body = b"3;" + b"a" * 500_000 + b"\r\nabc\r\n0\r\n\r\n"
    yield Case("7.1.1", "an extension of 500,000 bytes", chunked(body), "may refuse", RAN_ABC)
    for name, body in {
        "the last chunk": b"3\r\nabc\r\n",
        "the last line": b"3\r\nabc\r\n0\r\n",
        "data": b"3\r\nab",
    }.items():
        yield Case("8", f"chunks without {name}", chunked(body), "refuse", ends=True)


def _connections() -> Iterable[Case]:
    yield Case("9.3", "two requests", get() + get(target="/b"), "run", ("GET /a", "GET /b"))
    yield Case("9.3", "a body and a request", sized(b"abc") + get(target="/b"), "run", (*RAN_ABC, "GET /b"))
    yield Case("9.3", "chunks and a request", chunked(ABC) + get(target="/b"), "run", (*RAN_ABC, "GET /b"))
    yield Case("9.3.2", "fifty requests", get() * 50, "run", RAN * 50)
    yield Case("9.3.2", "fifty bodies", (sized(b"abc") + chunked(ABC)) * 25, "run", RAN_ABC * 50)
    yield Case("9.3.2", "a word behind a request", get() + b"hello\r\n\r\n", "refuse", before=RAN)
    yield Case("9.3.2", "a word behind five requests", get() * 5 + b"hello\r\n\r\n", "refuse", before=RAN * 5)
    yield Case("9.3.2", "bad chunks behind a request", get() + chunked(b"!\r\n"), "refuse", before=RAN)
    for line in (
        "Connection: keep-alive",
        "Connection:",
        "Connection: closed",
        "Connection: x, y",
        "Keep-Alive: timeout=0",
    ):
        yield Case("9.3", line, get(line), "run", RAN)
    yield Case("9.3", "Proxy-Connection: close", get("Proxy-Connection: close"), "run", RAN, closes=None)
    for lines in (
        ["Connection: close"],
        ["Connection: Close"],
        ["connection: CLOSE"],
        ["Connection: keep-alive, close"],
        ["Connection: close, keep-alive"],
        ["Connection: x,close"],
        ["Connection: , close ,"],
        ["Connection: keep-alive", "Connection: close"],
        ["Connection: close", "Connection: keep-alive"],
        ["Connection: close", "Connection: close"],
    ):
        yield Case("9.6", " and ".join(lines), get(*lines), "run", RAN, closes=True)
    yield Case("9.6", "close and a body", sized(b"abc", "Connection: close"), "run", RAN_ABC, closes=True)
    yield Case("9.6", "close and chunks", chunked(ABC, "Connection: close"), "run", RAN_ABC, closes=True)
    yield Case("9.6", "close and garbage", get("Connection: close") + b"hello\r\n\r\n", "run", RAN, closes=True)
    yield Case(
        "9.6",
        "close and another body",
        sized(b"abc", "Connection: close") + sized(SMUGGLED),
        "run",
        RAN_ABC,
        closes=True,
    )
    yield Case("9.3", "HTTP/1.0 and another request", get(version="HTTP/1.0") + get(), "run", RAN, closes=True)
    line = "Connection: keep-alive"
    yield Case("9.3", "HTTP/1.0 with keep-alive", get(line, version="HTTP/1.0"), "run", RAN, closes=None)
    for name in ("Content-Length", "Host", "Transfer-Encoding"):
        lines = f"Connection: {name}", "Content-Length: 3"
        yield Case("9110-7.6.1", f"Connection: {name}", post(b"abc", *lines), "run", RAN_ABC)


def _upgrades() -> Iterable[Case]:
    section, body = "9110-7.8", SMUGGLED.decode()
    yield Case(section, "h2c", get(*OFFER), "run", RAN)
    yield Case(section, "h2c twice", get(*OFFER) * 2, "run", RAN * 2)
    yield Case(section, "h2c with a body", sized(SMUGGLED, *OFFER), "run", (f"POST /a {body}",))
    yield Case(section, "h2c with two bodies", sized(SMUGGLED, *OFFER) * 2, "run", (f"POST /a {body}",) * 2)
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
    yield Case(section, "h2c with chunks", chunked(chunks, *OFFER), "run", (f"POST /a {body}",))
    yield Case(section, "h2c with chunks and a trailer", chunked(ABC[:-2] + b"X: a\r\n\r\n", *OFFER), "run", RAN_ABC)
    yield Case(section, "h2c with bad chunks", chunked(b"!\r\n", *OFFER), "refuse")
    yield Case(section, "h2c with an empty body", sized(b"", *OFFER) + get(), "run", ("POST /a", *RAN))
    yield Case(section, "h2c and close", get(*OFFER, "Connection: close"), "run", RAN, closes=True)
    yield Case(section, "h2c in HTTP/1.0", get(*OFFER, version="HTTP/1.0"), "run", RAN, closes=True)
    yield Case(
        section, "h2c with both lengths", chunked(ABC, *OFFER, "Content-Length: 3"), "may refuse", RAN_ABC, closes=True
    )
    yield Case(section, "h2c with two lengths", sized(b"abc", *OFFER, "Content-Length: 9"), "refuse")
    yield Case(section, "h2c without Host", head("GET /a HTTP/1.1", *OFFER, host=None), "refuse")
    for name, lines in {"behind": (*MANY, *OFFER), "before": (*OFFER, *MANY)}.items():
        yield Case(
            section, f"h2c {name} 120 headers with a body", sized(SMUGGLED, *lines), "may refuse", (f"POST /a {body}",)
        )
        yield Case(
            section, f"h2c {name} 120 headers with chunks", chunked(chunks, *lines), "may refuse", (f"POST /a {body}",)
        )
    for offer in ("TLS/1.0", "HTTP/2.0", "foo", "h2c, foo"):
        lines = "Connection: Upgrade", f"Upgrade: {offer}"
        yield Case(section, f"Upgrade: {offer} with a body", sized(SMUGGLED, *lines), "run", (f"POST /a {body}",))
    lines = "Connection: Upgrade", "Upgrade: websocket"
    yield Case(section, "websocket with a body", sized(SMUGGLED, *lines), "may run", (f"POST /a {body}",))
    yield Case(section, "Upgrade without Connection", sized(SMUGGLED, "Upgrade: h2c"), "run", (f"POST /a {body}",))
    yield Case(
        section, "Connection: Upgrade alone", sized(SMUGGLED, "Connection: Upgrade"), "run", (f"POST /a {body}",)
    )
    yield Case(section, "a word behind h2c", get(*OFFER) + b"hello\r\n\r\n", "refuse", before=RAN)


def _semantics() -> Iterable[Case]:
    expect = "Expect: 100-continue"
    yield Case("9110-10.1.1", "Expect with a body", sized(b"abc", expect), "run", RAN_ABC)
    yield Case("9110-10.1.1", "Expect with chunks", chunked(ABC, expect), "run", RAN_ABC)
    yield Case("9110-10.1.1", "Expect without a body", get(expect), "run", RAN)
    yield Case(
        "9110-10.1.1",
        "Expect in HTTP/1.0",
        sized(b"abc", expect, version="HTTP/1.0"),
        "run",
        RAN_ABC,
        closes=True,
        lacks=rb" 100 ",
    )
    yield Case("9110-10.1.1", "another expectation", sized(b"abc", "Expect: x"), "may run", RAN_ABC)
    date = rb"\r\n[Dd]ate: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n"
    yield Case("9110-6.6.1", "Date", get(), "run", RAN, has=date)
    yield Case("9110-6.6.1", "Date of a stream", get(target="/stream"), "run", ("GET /stream",), has=date)
    yield Case(
        "9110-9.3.2", "HEAD and GET", head("HEAD /a HTTP/1.1") + get(), "run", ("HEAD /a", *RAN), lacks=rb"HEAD /a"
    )
    yield Case(
        "9110-9.3.2", "HEAD of a stream", head("HEAD /stream HTTP/1.1"), "run", ("HEAD /stream",), lacks=rb"part one"
    )
    yield Case(
        "9110-15.3.5",
        "204 has no body",
        get(target="/204"),
        "run",
        ("GET /204",),
        lacks=rb"(?i)204.*\r\n(.+\r\n)*(content-length|transfer-encoding)",
    )


# The application


class Recorder:
    """An ASGI application that answers with what it executed and records it. `GET /executed` returns and forgets it."""

    def __init__(self) -> None:
        self.executed: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        target = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0]
        target += b"?" + scope["query_string"] if scope["query_string"] else b""
        words = [scope["method"], target.decode("latin-1"), *([body.decode("latin-1")] if body else [])]
        reply, status, parts = " ".join(words).encode("latin-1"), 200, [b""]
        if scope["path"] == "/executed":
            reply, self.executed = json.dumps(self.executed).encode(), []
        else:
            self.executed.append(" ".join(words))
        if scope["path"] == "/stream":
            parts = [b"part one", b"part two", b""]
        elif scope["path"] == "/204":
            status, parts = 204, [b""]
        else:
            parts = [reply]
        headers = [(b"content-length", b"%d" % len(reply))] if parts == [reply] else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for number, part in enumerate(parts, 1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})


# Running and judging


def outcome(port: int, case: Case, pieces: Sequence[bytes] = (), seconds: float = 5.0) -> Outcome:
    """Send the case, at once or in pieces, and find what a `Recorder` on this port has executed."""
    answer, closed = b"", False
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # it may be refused before all of it was sent
            for piece in pieces or [sent(case)]:
                sock.sendall(piece)
        try:
            if case.ends:
                time.sleep(HALF_CLOSED_SECONDS)
                sock.shutdown(socket.SHUT_WR)
            while received := sock.recv(1 << 16):
                answer += received
            closed = True
        except TimeoutError:
            pass
        except OSError:
            closed = True
    statuses = tuple(int(each) for each in re.findall(rb"HTTP/1\.[01] ([2-5]\d\d)", answer))
    return Outcome(tuple(executed(port)), statuses, closed, answer)


def sent(case: Case) -> bytes:
    return case.data if case.ends else case.data + PROBE


def executed(port: int) -> list[str]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(b"GET /executed HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    found: list[str] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return found


def fault(case: Case, found: Outcome, *, exact: bool = False) -> str | None:
    """What is wrong with the outcome, None if nothing is. `exact`: where the RFC permits both, only what Plaudit's
    listener does is right, and a refusal has an error reply."""
    run, refuse = _run_fault(case, found), _refuse_fault(case, found, exact)
    if exact and case.deviates:
        return refuse
    if case.verdict == "run" or (exact and case.verdict == "may run"):
        return run
    if case.verdict == "refuse" or (exact and case.verdict == "may refuse"):
        return refuse
    return run and refuse and f"{run}; {refuse}"


def _run_fault(case: Case, found: Outcome) -> str | None:
    expected = {False: [(*case.runs, END)], True: [case.runs], None: [(*case.runs, END), case.runs]}[case.closes]
    if found.executed not in expected:
        return f"executed {_short(found.executed)}, not {_short(expected[0])}"
    if any(status >= 300 for status in found.statuses) or len(found.statuses) != len(found.executed):
        return f"answered {found.statuses}"
    if not found.closed:
        return "left the connection open"
    if re.search(case.lacks, found.answer) or not re.search(case.has, found.answer):
        return f"answered {found.answer[:300]!r}"
    return None


def _refuse_fault(case: Case, found: Outcome, exact: bool) -> str | None:
    if found.executed != case.before:
        return f"executed {_short(found.executed)}, not {_short(case.before)}"
    statuses = found.statuses[len(case.before) :]
    if (len(statuses) > 1 or any(status < 400 for status in statuses)) or (exact and not (statuses or case.ends)):
        return f"answered {found.statuses}"
    if not found.closed and not case.ends:
        return "left the connection open"
    return None


def _short(executed: Iterable[str]) -> str:
    return str([each[:60] for each in executed])
