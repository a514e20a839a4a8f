"""Search over HTTP, on a server with a policy and a process model."""
