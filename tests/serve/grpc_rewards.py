"""Calls RewardClient over gRPC in a separate process, because gRPC's threads are incompatible with forks. Input (stdin,
JSON): the port, the key, the items and, for TLS, the CA and a certificate. Output: the results of each kind of call, or
its exception."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

from plaudit.client.client import RewardClient
from plaudit.errors import PlauditError

config = json.load(sys.stdin)
url = f"{'grpcs' if 'ca' in config else 'grpc'}://localhost:{config['port']}"
items, key, ca = config["items"], config["key"], config.get("ca")
results = {}


def outcome(name, urls=url, *, what=items, steps=False, **options):
    with RewardClient(
        urls, **{"api_key": key, "ca_file": ca, "client_cert": config.get("cert"), "timeout": 120, **options}
    ) as client:
        try:
            results[name] = [
                [each.value, each.version, each.error and each.error.type] for each in client.score(what, steps=steps)
            ]
        except PlauditError as error:
            results[name] = [type(error).__name__, getattr(error, "status", None), str(error)]


outcome("scores")
if ca is None:
    outcome("steps", steps=True)
    outcome("unknown", model="smus")
    outcome("stranger", api_key="key-of-nobody")
    outcome("large", what=[{"text": "a" * 300_000}])
    outcome("nowhere", "grpc://localhost:1", retries=1)
    outcome("other", ["grpc://localhost:1", url])

    calls = []

    def busy_once(body, context):
        """Reject the first call as an overloaded server does, then return a score."""
        calls.append(body)
        if len(calls) == 1:
            status = (("x-status", "503"), ("x-error-type", "overloaded"), ("retry-after", "1"))
            context.set_trailing_metadata(status)
            context.abort(grpc.StatusCode.UNAVAILABLE, "too much waits")
        return json.dumps({"model": "sums", "version": "v", "items": [{"scores": [1.5]}]}).encode()

    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {"Score": grpc.unary_unary_rpc_method_handler(busy_once)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("plaudit.Rewards", handlers),))
    port = server.add_insecure_port("localhost:0")
    server.start()
    retries = []
    outcome("busy", f"grpc://localhost:{port}", what=[{"text": "a"}], on_retry=lambda why, _: retries.append(why))
    results["heard"] = retries
    server.stop(None)
else:
    outcome("untrusted", ca_file=config["others"])
results["modules"] = [name for name in ("torch", "google.protobuf", "plaudit.serve") if name in sys.modules]
print(json.dumps(results))
