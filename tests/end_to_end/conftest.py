"""Cells and references that the tests of this folder share; forked ranks ask for one thread in their parent."""

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.laboratory import Laboratory

torch.set_num_threads(1)
MAX_TOKENS = 4
"""From a prompt one token short of a block border the output crosses it."""


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    laboratory = Laboratory(tmp_path_factory.mktemp("models"), MAX_TOKENS)
    yield laboratory
    laboratory.close()
