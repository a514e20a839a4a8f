import pytest

from tests.place.rollout_host import RolloutHost


@pytest.fixture(scope="session")
def rollout_host() -> RolloutHost:
    return RolloutHost()
