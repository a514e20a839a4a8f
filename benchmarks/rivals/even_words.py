"""A reward that differs between samples of an untrained policy: the share of words with even numbers."""

from __future__ import annotations


def share(prompt: str, response: str, truth: str) -> float:
    words = response.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))
