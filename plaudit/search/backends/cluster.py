"""Clusters similar steps: average linkage by cosine distance with a threshold."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from plaudit.errors import RequestError


def by_vector(vectors: np.ndarray, threshold: float) -> list[int]:
    """A cluster number for each row, numbered from 0 in order of appearance. Rows of zeros have no direction and form
    one cluster."""
    from scipy.cluster.hierarchy import fcluster, linkage

    if not np.isfinite(vectors).all():
        raise RequestError(
            "an embedding has values that are not finite, so steps cannot be clustered with it; use another encoder"
        )
    lengths = np.linalg.norm(vectors, axis=1)
    labels = np.zeros(len(vectors), dtype=int)
    directed = np.flatnonzero(lengths > 0)
    if len(directed) > 1:
        units = vectors[directed].astype(np.float64) / lengths[directed, None]
        labels[directed] = fcluster(linkage(units, method="average", metric="cosine"), threshold, criterion="distance")
    elif len(directed):
        labels[directed] = 1
    return by_key(labels.tolist())


def by_key(keys: Sequence[Hashable]) -> list[int]:
    """Clusters equal keys."""
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]
