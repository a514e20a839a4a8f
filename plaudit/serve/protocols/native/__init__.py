"""Plaudit's own protocol: `/v1/rewards` and what the live page needs."""
