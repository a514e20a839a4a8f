"""Replicas managed by Ray Serve; `plaudit deploy`."""
