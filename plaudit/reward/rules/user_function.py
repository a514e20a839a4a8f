"""A user's function as a rule: its calling convention is detected from its signature when it is loaded.

        f(prompt, response, truth, ...)                              returns a number
        f(prompt, responses, truth, ...)                             returns a number for each response to a prompt
        f(prompts, completions, ...)                                 the same with TRL's convention: lists, by name
        f(data_source, solution_str, ground_truth, extra_info=None)  a number or {"score": number}, verl's convention

`...` stands for columns of the data's row, by name; `row` is a dictionary of all columns, `**columns` those without a
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, iscoroutinefunction, signature
from typing import Any

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
BY_NAME = {  # conventions called by keyword: the arguments of every call
    "trl": ("prompts", "completions", "truth"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
}
TRL_ALONE = ("trainer_state", "completion_ids", "prompt_ids", "log_extra", "log_metric", "environments")
FORMS = "(prompt, response, truth), or responses for all responses to a prompt, then columns of the row by name"


class UserFunction:
    """batched   called once with all responses to a prompt
    columns   the row's columns it receives: names, or None for all
    required  the columns it cannot be called without
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        name = getattr(function, "__name__", type(function).__name__)
        if iscoroutinefunction(function):
            raise TypeError(f"{name} is async; expected a regular function of {FORMS}")
        parameters = _parameters(function)
        names = [each.name for each in parameters]
        self.form = "trl" if "completions" in names else "verl" if "solution_str" in names else "own"
        first, others = _split(parameters, 0 if self.form in BY_NAME else 3)
        several = any(each.kind is Parameter.VAR_POSITIONAL for each in parameters)
        if (len(first) < 3 and self.form == "own" and not several) or any(
            each.kind is Parameter.POSITIONAL_ONLY for each in others
        ):
            raise TypeError(f"{name}({', '.join(names)}) cannot be called; expected {FORMS}")
        self.batched = self.form == "trl" or (self.form == "own" and names[1:2] == ["responses"])
        self._first = [each.name for each in first]
        self._names = [each.name for each in others]
        self._rest = any(each.kind is Parameter.VAR_KEYWORD for each in parameters)
        always = BY_NAME.get(self.form, ("row",))
        needed = [each.name for each in others if each.default is Parameter.empty]
        self.required = [each for each in needed if each not in always]
        whole = self._rest or {"row", "extra_info"} & {*self._names}
        self.columns = None if whole else [each for each in self._names if each not in always or each == "data_source"]
        if self.form == "trl" and (foreign := {*self.required} & {*TRL_ALONE}):
            raise TypeError(f"{name} needs {', '.join(sorted(foreign))}, which only TRL provides; give it a default")

    def __call__(self, request: Mapping[str, Any]) -> Any:
        """`request` has prompt, truth, columns, and response or, if batched, responses."""
        columns: dict[str, Any] = request["columns"]
        if self.form == "own":
            answer = request["responses" if self.batched else "response"]
            return self.function(request["prompt"], answer, request["truth"], **self._named(columns, row=columns))
        if self.form == "verl":
            known = {"solution_str": request["response"], "ground_truth": request["truth"]}
            offered = {"data_source": None, "extra_info": columns, **columns, **known}
            value = self.function(**self._named(offered))
            return value["score"] if isinstance(value, dict) else value
        prompt, responses = request["prompt"], request["responses"]
        lists = {name: [value] * len(responses) for name, value in {"truth": request["truth"], **columns}.items()}
        # For a conversational prompt a completion is a list of messages.
        chat = isinstance(prompt, list)
        completions = [[{"role": "assistant", "content": each}] if chat else each for each in responses]
        return self.function(**self._named({**lists, "prompts": [prompt] * len(responses), "completions": completions}))

    def _named(self, offered: Mapping[str, Any], **further: Any) -> dict[str, Any]:
        kept = {name: value for name, value in offered.items() if self._rest or name in self._names}
        kept |= {name: value for name, value in further.items() if name in self._names}
        return {name: value for name, value in kept.items() if name not in self._first}


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    try:
        return list(signature(function).parameters.values())
    except ValueError:  # a builtin without a signature
        return [Parameter("given", Parameter.VAR_POSITIONAL)]


def _split(parameters: list[Parameter], count: int) -> tuple[list[Parameter], list[Parameter]]:
    """The first `count` parameters that can be passed by position, and all other named ones."""
    first = [each for each in parameters if each.kind in POSITIONAL][:count]
    return first, [each for each in parameters if each not in first and each.kind not in VARIABLE]
