"""`--rewrite` writes what came out of each story into its file; read the diff before it is kept."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the outcomes of scenarios into their files")
