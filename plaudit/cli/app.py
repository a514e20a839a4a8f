"""The application that commands are registered with, and options shared by several commands."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

F = TypeVar("F", bound=Callable[..., Any])


def _quick(parameters: list[Any]) -> list[Any]:
    """Unset options stay None without typer's converters, which import pydantic in typer 0.29: 0.2 s."""
    for parameter in parameters:
        if "process_value" not in vars(parameter):
            parameter.process_value = partial(_processed, parameter.process_value, parameter)
    return parameters


def _processed(process: Any, parameter: Any, context: Any, value: Any) -> Any:
    if value is not None or parameter.required or parameter.multiple or parameter.nargs == -1:
        return process(context, value)
    return None if parameter.callback is None else parameter.callback(context, parameter, None)


class QuickCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _quick(super().get_params(ctx))


class QuickGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _quick(super().get_params(ctx))


class App(typer.Typer):
    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        return super().command(name, cls=QuickCommand, **settings)


app = App(
    cls=QuickGroup,
    help="Serve reward models, train policies against them, search with them, plan the hardware.",
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
bench = App(cls=QuickGroup, help="Benchmark this machine; each figure is shown with its limit.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Sets = Annotated[list[str], typer.Option("--set", metavar="A.B=C", help="Override one key of the recipe; repeatable.")]
Out = Annotated[Path | None, typer.Option(help="Run directory. Default: runs/<recipe stem>.")]


def resolve_model(name: str) -> Path:
    """A model's directory. Reports a wrong name before torch is imported, which takes seconds."""
    from plaudit.models import resolve

    return resolve(name)
