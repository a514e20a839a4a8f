"""Silences transformers' progress bars and load reports, and restores its global settings afterwards."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

# Verbosity, warning filters and torch's random state are process-wide: one load or save at a time.
_LOCK = threading.RLock()


@contextmanager
def quiet() -> Iterator[None]:
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
