"""Chat templates: messages to token ids, in which only the template can write control tokens.

1. Every string of a message is guarded: a mark, a character used nowhere else, is inserted into each control string.
2. The template runs on the guarded messages, in another process, with a deadline.
3. What is still a whole control string was written by the template. The text between loses its marks and is read
   literally.

Where no content would have become a control token this is exactly `tokenizer.apply_chat_template`, except that a key of
a message whose value is None, and an empty list of tool calls, are the same as a missing key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

from transformers import PreTrainedTokenizerFast

from plaudit.errors import ModelError, RequestError, nearest
from plaudit.models.chat.renderer import RENDERER
from plaudit.models.text import Codec, codec_of, refuse_surrogates

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters: never in interchanged text
Message = Mapping[str, Any]


def render_chat(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], add_generation_prompt: bool = False, *,
    continue_final_message: bool = False, seconds: float = 5.0, variables: Mapping[str, Any] | None = None,
) -> list[int]:  # fmt: skip
    """Return the token ids of a conversation. The template has `seconds` to render it. `variables` are further inputs
    of the template: tools, or its own switches. Their text does not become control tokens either. With
    `continue_final_message` it ends behind the content of the last message, which is unfinished."""
    return render_chats(
        tokenizer, [messages], add_generation_prompt, continue_final_message=continue_final_message, seconds=seconds,
        variables=variables,
    )[0]  # fmt: skip


def render_chats(
    tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Sequence[Message]], add_generation_prompt: bool = False,
    *, continue_final_message: bool = False, seconds: float = 5.0, variables: Mapping[str, Any] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Render many conversations in one call to the template process. The first failure is raised."""
    template, seams = _template(tokenizer, variables), _Seams(codec_of(tokenizer))
    guards, guarded, guarded_variables = [], [], []
    for messages in conversations:
        _check_messages(messages, template)
        guards.append(guard := _Guard(seams, *_choose_marks(template, [*messages, variables or {}])))
        guarded.append([guard.value(with_tool_calls(message)) for message in messages])
        guarded_variables.append({name: guard.value(value, literal=()) for name, value in (variables or {}).items()})
        if continue_final_message:
            guard.mark_end(guarded[-1][-1])
    rendered = _render(tokenizer, template, guarded, add_generation_prompt, seconds, guarded_variables)
    if continue_final_message:
        rendered = [guard.before_end(text) for guard, text in zip(guards, rendered, strict=True)]
    careful = [guard.used or seams.codec.unknown_ends for guard in guards]
    plain = iter(
        _encode_plain(
            tokenizer, seams.codec, [text for text, marked in zip(rendered, careful, strict=True) if not marked]
        )
    )
    return [
        _encode_guarded(tokenizer, seams.codec, text, guard.mark) if marked else next(plain)
        for guard, text, marked in zip(guards, rendered, careful, strict=True)
    ]


def render_text(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, seconds: float = 5.0) -> str:
    """Render messages whose contents are trusted."""
    template = _template(tokenizer)
    _check_messages(messages, template)
    return _render(tokenizer, template, [[with_tool_calls(message) for message in messages]], False, seconds, [{}])[0]


def with_tool_calls(message: Message) -> dict[str, Any]:
    """Convert a message to the form templates expect. OpenAI's clients send missing fields as null, which templates
    take for present. An assistant's tool calls are converted as by vLLM: missing content is an empty text, and the
    arguments, which OpenAI clients send as JSON text, are an object."""
    message = {name: value for name, value in message.items() if value is not None or name == "content"}
    calls = message.get("tool_calls")
    if calls == []:
        del message["tool_calls"]
        return message
    if message.get("role") != "assistant" or not isinstance(calls, list):
        return message
    if message.get("content") is None:
        message["content"] = ""
    return {**message, "tool_calls": [_with_arguments(call) for call in calls]}


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
    except ValueError:
        problem = f"a tool call's arguments are {arguments[:60]!r}, which is not JSON; send an object"
        raise RequestError(problem) from None


def _render(
    tokenizer: PreTrainedTokenizerFast, template: str, conversations: Sequence[Sequence[Message]],
    add_generation_prompt: bool, seconds: float, variables: Sequence[Mapping[str, Any]],
) -> list[str]:  # fmt: skip
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}
    return RENDERER.render(template, conversations, add_generation_prompt, names, seconds, variables)


class _Guard:
    def __init__(self, seams: _Seams, mark: str, end: str) -> None:
        self.seams, self.mark, self.end, self.used = seams, mark, end, False

    def mark_end(self, message: dict[str, Any]) -> None:
        if not isinstance(message.get("content"), str) or message.get("tool_calls"):
            raise RequestError("the last message, which is unfinished, must have a text as content and no tool calls")
        message["content"] += f"{self.end} "

    def before_end(self, rendered: str) -> str:
        """What the template writes up to the end of the last content, as transformers determines it: if it loses the
        space that follows, the template trims contents."""
        text, found, rest = rendered.rpartition(self.end)
        if not found:
            raise RequestError("the chat template omits the content of the last message, which is unfinished")
        return text if rest.startswith(" ") else text.rstrip()

    def value(self, value: Any, key: str = "", literal: Sequence[str] = ("role", "type")) -> Any:
        """`literal`: keys whose text stays as it is."""
        if isinstance(value, str):
            return value if key in literal else self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.value(item, str(name), literal) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item, literal=literal) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise RequestError(f"a message contains a {type(value).__name__}; expected text, numbers, lists and objects")

    def text(self, text: str) -> str:
        cuts = self.seams[text]
        if not cuts:
            return text
        self.used = True
        return self.mark.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))


class _Seams(dict[str, list[int]]):
    """Where a text must be cut, so that neither it nor an end of it beside the template's own text makes a control
    string. What many conversations have in common, such as their first turns, is looked at once."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def __missing__(self, text: str) -> list[int]:
        refuse_surrogates(text)
        places = {match.start() + 1 for match in self.codec.pattern.finditer(text)}
        places |= self._ends(text)
        if self.codec.normalized and self._hidden(text):
            places |= set(range(1, len(text)))
        self[text] = sorted(places)
        return self[text]

    def _ends(self, text: str) -> set[int]:
        """Ends of the text, as it is or trimmed, that the template's own text could complete to a control string."""
        places = set()
        codec, stripped = self.codec, text.strip()
        if stripped:
            start = text.find(stripped)
            inside = len(stripped) <= codec.longest and any(stripped in each for each in codec.controls.values())
            if inside or codec.begins_as_one_ends(stripped):
                places.add(start)
            if codec.ends_as_one_begins(stripped):
                places.add(start + len(stripped))
        if text != stripped:
            if codec.begins_as_one_ends(text):
                places.add(0)
            if codec.ends_as_one_begins(text):
                places.add(len(text))
        return places

    def _hidden(self, text: str) -> bool:
        """Whether normalising (of full-width characters, say) uncovers a control string."""
        return self.codec.pattern.search(self.codec.backend.normalizer.normalize_str(text)) is not None


def _encode_plain(tokenizer: PreTrainedTokenizerFast, codec: Codec, texts: list[str]) -> list[list[int]]:
    """Texts in which every control string is a control token. The tokenizer encodes what is between two of these alone,
    so that what conversations share, such as a long prompt, is encoded once."""
    if not codec.divides:
        return _encode_whole(tokenizer, texts)
    divided = [_divided(codec, text) for text in texts]
    parts = dict.fromkeys(part for each in divided for part in each)
    ids = codec.parts.get_all(parts)
    new = [part for part in parts if part not in ids]
    encoded = dict(zip(new, _encode_whole(tokenizer, new), strict=True))
    codec.parts.put_all(encoded)
    ids.update(encoded)
    return [[token for part in each for token in ids[part]] for each in divided]


def _divided(codec: Codec, text: str) -> list[str]:
    """The parts of a text, each of which but the first begins with a control string."""
    starts = [match.start() for match in codec.strings.finditer(text)]
    cuts = sorted({0, *starts, len(text)})
    return [text[begin:end] for begin, end in pairwise(cuts)]


def _encode_whole(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Together: the tokenizer takes a core for each."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return ids


def _encode_guarded(tokenizer: PreTrainedTokenizerFast, codec: Codec, rendered: str, mark: str) -> list[int]:
    controls = _controls(tokenizer, codec, rendered)
    freed = _freed(controls, rendered, mark)
    text = _unmarked(rendered, mark)
    # If the same control tokens stand at the same places without the marks, the guard was not needed.
    if not codec.unknown_ends and _controls(tokenizer, codec, text) == freed:
        whole: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return whole
    ids: list[int] = []
    done = 0
    for token, begin, end in freed:
        ids += [*codec.literal(text[done:begin]), token]
        done = end
    return ids + codec.literal(text[done:])


def _freed(controls: list[tuple[int, int, int]], rendered: str, mark: str) -> list[tuple[int, int, int]]:
    """The control tokens with their spans in the text without marks. In one pass: there may be many of both."""
    freed = []
    seen = length = 0
    for token, begin, end in controls:
        start = length + len(_unmarked(rendered[seen:begin], mark))
        length = start + len(_unmarked(rendered[begin:end], mark))
        freed.append((token, start, length))
        seen = end
    return freed


def _controls(tokenizer: PreTrainedTokenizerFast, codec: Codec, text: str) -> list[tuple[int, int, int]]:
    """Control tokens written out in the text, each with its span."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [
        (token, begin, end)
        for token, (begin, end) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
        if token in codec.controls and (token != codec.unknown or text[begin:end].strip() == codec.controls[token])
    ]


def _unmarked(text: str, mark: str) -> str:
    return text.replace(mark, "").replace(_escaped(mark), "")


def _escaped(mark: str) -> str:
    """The mark as a template's JSON filter may write it."""
    return f"\\u{ord(mark):04x}"


def _choose_marks(template: str, messages: Sequence[Message]) -> tuple[str, str]:
    """One for control strings, one for the end of the last content."""
    seen = template + repr(messages)
    free = list(islice((mark for mark in MARKS if mark not in seen and _escaped(mark) not in seen), 2))
    if len(free) < 2:
        raise RequestError("the messages contain every Unicode noncharacter from U+FDD0 to U+FDEF; remove some")
    return free[0], free[1]


def has_chat_template(tokenizer: PreTrainedTokenizerFast) -> bool:
    return bool(_default_template(tokenizer))


def _default_template(tokenizer: PreTrainedTokenizerFast) -> Any:
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, Mapping) else template


def _template(tokenizer: PreTrainedTokenizerFast, variables: Mapping[str, Any] | None = None) -> str:
    template, named = _default_template(tokenizer), tokenizer.chat_template
    if variables and variables.get("tools"):
        template = named.get("tool_use", template) if isinstance(named, Mapping) else template
        if template and "tools" not in template:
            raise RequestError(
                "the model's chat template does not render tools, so the model would not see them: remove them"
            )
    if not template:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; "
            "set tokenizer.chat_template and save it, or send {prompt, responses} instead of {messages}"
        )
    return str(template)


def _check_messages(messages: Sequence[Message], template: str) -> None:
    if not messages:
        raise RequestError("the list of messages is empty; give at least one")
    for place, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise RequestError(f"message {place} has no role; expected an object with role and content")
        # A role reaches the template unguarded, since some templates build a control token from it: "<|" + role + "|>".
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise RequestError(f"message {place} has the role {role[:40]!r}; {nearest(role[:40], ROLES)}")
