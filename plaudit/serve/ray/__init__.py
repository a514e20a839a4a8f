"""Replicas that Ray Serve keeps; `plaudit deploy`."""
