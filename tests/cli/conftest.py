"""Model files for the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime.tiny import write_tiny

from colibri.runtime.engine import demo_model_path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with tokenizer and chat template."""
    return write_tiny(tmp_path_factory.mktemp("cli") / "tiny.cbi")


@pytest.fixture(scope="session")
def ids_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without tokenizer."""
    return write_tiny(tmp_path_factory.mktemp("cli") / "ids.cbi", tokenizer=False)


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without chat template."""
    return write_tiny(tmp_path_factory.mktemp("cli") / "plain.cbi", template=None)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The model in the package."""
    return demo_model_path()
