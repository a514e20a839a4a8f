"""Model workers: the process that runs a model, the server's end of it, replicas, ranks, routing and the fair queue."""
