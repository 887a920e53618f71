"""Clients for apps made of fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.api.wire import Client
from tests.fakes import fake_context


@pytest.fixture
async def make_client() -> AsyncIterator[Callable[..., Client]]:
    made: list[Client] = []

    def make(**options: Any) -> Client:
        made.append(Client(fake_context(**options)))
        return made[-1]

    yield make
    for client in made:
        await client.http.aclose()


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client()
