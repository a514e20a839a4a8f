import pytest

from tests.place.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Nursery:
    return Nursery()
