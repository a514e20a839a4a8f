"""`plaudit serve`, `deploy`, `critic`: models behind HTTP."""

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plaudit.cli.app import app

if TYPE_CHECKING:
    from plaudit.config.serve import ServeTable

ApiKeyFile = Annotated[
    Path | None, typer.Option(help="A file of hashed keys, created by `plaudit keys add`; reloaded when it changes.")
]
Uds = Annotated[Path | None, typer.Option(metavar="PATH", help="A unix socket instead of host and port.")]
TlsCert = Annotated[Path | None, typer.Option(metavar="FILE", help="PEM certificate: listen with TLS.")]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key, in PEM.")]
TlsCa = Annotated[
    Path | None, typer.Option(metavar="FILE", help="PEM of a CA: accept only clients with a certificate of it.")
]

StateFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Persist swaps across restarts in this file.")]
GrpcPort = Annotated[
    int | None, typer.Option(metavar="PORT", help="A port for gRPC (KServe v2, Triton); 0: a free one.")
]


@app.command("serve")
def serve_rewards(
    model: Annotated[
        list[str],
        typer.Option(
            metavar="NAME_OR_DIR", help="A model to serve, or NAME=DIR; repeatable. Default: sums, sums-steps."
        ),
    ] = [],  # noqa: B006
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with models and settings; flags override it.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0: a free one. Default: 5555.")] = None,
    api_key: Annotated[
        list[str], typer.Option(envvar="PLAUDIT_API_KEY", help="An API key, or NAME=KEY; repeatable.")
    ] = [],  # noqa: B006
    admin_key: Annotated[str | None, typer.Option(envvar="PLAUDIT_ADMIN_KEY", help="The key for admin routes.")] = None,
    allow_open: Annotated[
        str | None, typer.Option(metavar="PROTOCOLS", help="Protocols that need no key, separated by commas.")
    ] = None,
    protocols: Annotated[
        str | None, typer.Option(help="Protocols besides the native one, separated by commas. Default: all.")
    ] = None,
    alias: Annotated[list[str], typer.Option(metavar="NAME=MODEL", help="Another name of a model; repeatable.")] = [],  # noqa: B006
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tensor-parallel ranks of each model; on CUDA one GPU each.")
    ] = None,
    pipeline_parallel: Annotated[
        int | None, typer.Option(min=1, metavar="M", help="Pipeline stages of each model, with N ranks each.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=1, metavar="N", help="Replicas of each model.")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run the workers with Ray Serve: local, auto, or an address.")
    ] = None,
    api_key_file: ApiKeyFile = None,
    drain_delay: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Time from SIGTERM to draining: not ready, accepting requests."),
    ] = None,
    state_file: StateFile = None,
    grpc_port: GrpcPort = None,
    uds: Uds = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    log: Annotated[
        str | None, typer.Option(metavar="errors|requests", help="requests: one JSON line per request on stderr.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check whether it would start: one line per finding, exit code 0 or 2.")
    ] = False,
) -> None:
    """Serve reward models over HTTP."""
    from plaudit.serve.options import loading, serve_table

    table = serve_table(
        config, model, host, port, api_key, admin_key, allow_open, protocols, alias, tensor_parallel,
        pipeline_parallel, replicas, ray, api_key_file, drain_delay,
        uds=uds, tls_cert=tls_cert, tls_key=tls_key, tls_ca=tls_ca, log=log, state_file=state_file,
        grpc_port=grpc_port,
    )  # fmt: skip
    if check:
        from plaudit.serve.check import findings

        code = 0
        for well, line in findings(table):
            typer.echo(f"{'ok' if well else 'error'}: {line}")
            code = code if well else 2
        sys.exit(code)
    from plaudit.serve.workers.launched import serve_launched
    from plaudit.serve.workers.torchrun import launched

    if launched():
        sys.exit(serve_launched(table, partial(_serve, table)))
    with suppress(OSError):  # a full log disk must not prevent the start
        typer.echo(f"plaudit serve: {loading(table)}", err=True)
    sys.exit(_serve(table))


def _serve(table: "ServeTable") -> int:
    from plaudit.search.service.routes import SearchRoutes
    from plaudit.serve.server import serve

    return serve(table, lambda scoring: SearchRoutes(scoring, table).routes())


@app.command("deploy")
def print_ray_config(
    model: Annotated[
        list[str], typer.Option(metavar="NAME_OR_DIR", help="A model to deploy, or NAME=DIR; repeatable.")
    ] = [],  # noqa: B006
    config: Annotated[Path | None, typer.Option(help="The serve.toml of the server.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(min=1, metavar="N", help="Ranks of each replica.")] = None,
    pipeline_parallel: Annotated[int | None, typer.Option(min=1, metavar="M", help="Stages of each replica.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, metavar="N", help="Replicas of each model.")] = None,
) -> None:
    """Print the models of a server as a Ray Serve configuration, for a cluster."""
    from plaudit.serve.options import serve_table
    from plaudit.serve.ray.config import serve_config

    table = serve_table(
        config, model, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, replicas=replicas
    )
    typer.echo(serve_config(table), nl=False)


@app.command("critic")
def serve_critic_model(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_DIR", help="The model to initialise the critic from; of a policy its trunk is used."
        ),
    ] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="NAME_OR_DIR", help="An outcome model that scores in the same call.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings; flags override it.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0: a free one. Default: 5556.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: 1e-4.")] = None,
    clip: Annotated[float | None, typer.Option(help="Clipping of the value loss; 0: none. Default: 0.2.")] = None,
    save_dir: Annotated[str | None, typer.Option(help="Directory for critic_save. Default: critic.")] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume", help="Resume from the newest save, if there is one.")
    ] = None,
    api_key: Annotated[
        list[str], typer.Option(envvar="PLAUDIT_API_KEY", help="An API key, or NAME=KEY; repeatable.")
    ] = [],  # noqa: B006
    admin_key: Annotated[
        str | None, typer.Option(envvar="PLAUDIT_ADMIN_KEY", help="The key for routes that change the critic.")
    ] = None,
    allow_open: Annotated[
        str | None, typer.Option(metavar="PROTOCOLS", help="triton, critic-train: protocols that need no key.")
    ] = None,
    api_key_file: ApiKeyFile = None,
    uds: Uds = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Serve a critic that trains, for NeMo-Aligner's actors and `plaudit train`."""
    from plaudit.critic.server import critic_table, serve_critic

    table = critic_table(
        config, api_key, allow_open, model=model, reward=reward, host=host, port=port, lr=lr, clip=clip,
        save_dir=save_dir, resume=resume, admin_key=admin_key, api_key_file=api_key_file, uds=uds, tls_cert=tls_cert,
        tls_key=tls_key, tls_ca=tls_ca,
    )  # fmt: skip
    sys.exit(serve_critic(table))
