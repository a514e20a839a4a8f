"""Search behind HTTP, on a server that has a policy and a process model."""
