"""Model workers: the worker process, the server's connection to it, replicas, ranks, routing and the fair queue."""
