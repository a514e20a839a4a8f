"""Rows read with the package `datasets`: Hugging Face hub data sets and `save_to_disk` directories."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

from plaudit.errors import DataError, one_line

HUB = "hf:"


def dataset_rows(source: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of hf:NAME[@REVISION] or a directory, each with its origin. Options after `?`: split (train),
    subset, and renamed columns, such as prompt=question."""
    address, _, query = source.partition("?")
    renamed = dict(parse_qsl(query))
    split, subset = renamed.pop("split", "train"), renamed.pop("subset", None)
    name, _, revision = address.removeprefix(HUB).partition("@")
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source} needs the package datasets: pip install datasets") from None
    datasets.disable_progress_bars()
    try:
        if address.startswith(HUB):
            found = datasets.load_dataset(name, subset, split=split, revision=revision or None)
        else:
            found = datasets.load_from_disk(address)
            found = found[split] if isinstance(found, datasets.DatasetDict) else found
    except Exception as error:  # errors of the hub, the network, the file system, or a missing split
        raise DataError(f"{source}: the package datasets cannot load it: {one_line(error)}") from None
    missing = [column for column in renamed.values() if column not in found.column_names]
    if missing:
        raise DataError(f"{source}: has no column {missing[0]!r}; there are {', '.join(found.column_names)}")
    for number, fields in enumerate(found, 1):
        yield {**fields, **{to: fields[column] for to, column in renamed.items()}}, f"{name}[{number}]"
