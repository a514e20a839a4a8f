"""`plaudit keys`: manages the key file of `plaudit serve --api-key-file`."""

from pathlib import Path
from typing import Annotated

import typer

from plaudit.cli.app import app

keys = typer.Typer(help="Create and list API keys of a server.", no_args_is_help=True)
app.add_typer(keys, name="keys")
File = Annotated[Path, typer.Option(help="The file of hashed keys.")]


@keys.command("add")
def add(
    name: Annotated[str, typer.Argument(help="The key's name, used in logs, metrics and quotas.")],
    file: File = Path("keys.toml"),
    roles: Annotated[str, typer.Option(help="score, metrics, admin; separated by commas.")] = "score",
    expires: Annotated[str | None, typer.Option(metavar="WHEN", help="90d, 12h, or a date. Default: never.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(metavar="N", help="Default: no limit.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(metavar="N", help="Default: no limit.")] = None,
) -> None:
    """Print a new key, once, and write its hash to the file."""
    from plaudit.config.keys import parse_expiry
    from plaudit.serve.http.key_file import add_key

    fields = {
        "roles": [role.strip() for role in roles.split(",")],
        "expires": None if expires is None else parse_expiry(expires),
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
    }
    typer.echo(add_key(file, name, fields))
    typer.echo(f"plaudit keys: the key of {name}; it is stored as a hash in {file} and cannot be shown again", err=True)


@keys.command("list")
def show(file: File = Path("keys.toml")) -> None:
    """Print names, roles, expiry and quotas."""
    from plaudit.config.keys import read_keys

    for name, table in read_keys(file).items():
        expiry = (
            "never expires" if table.expires is None else f"{'expired' if table.expired else 'until'} {table.expires}"
        )
        quotas = {"requests": table.requests_per_minute, "tokens": table.tokens_per_minute}
        shown = ", ".join(f"{count} {what} per minute" for what, count in quotas.items() if count is not None)
        typer.echo(f"{name:<20} {','.join(table.roles):<20} {expiry:<34} {shown or 'no quota'}".rstrip())
