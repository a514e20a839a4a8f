"""HTTP server for reward models: the server, its protocols and its workers. Only `workers` import torch."""
