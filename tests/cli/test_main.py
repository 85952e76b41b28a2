"""The command line on a small program."""
from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fuseline.cli.main import app

PROGRAM = """
import torch

def program():
    return (lambda x: torch.relu(x) * 2 + 1), (torch.randn(32),)

def wrong():
    return 3
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "prog.py"
    file.write_text(PROGRAM)
    return str(file)


def test_explain(path: str):
    result = CliRunner().invoke(app, ["explain", f"{path}:program"])
    assert result.exit_code == 0 and "1 graph with" in result.output


def test_bench(path: str):
    result = CliRunner().invoke(app, ["bench", f"{path}:program", "--iterations", "3"])
    assert result.exit_code == 0 and "eager ms" in result.output


@pytest.mark.parametrize("target", ["absent.py:f", "{path}", "{path}:absent", "{path}:wrong"])
def test_a_wrong_target_is_explained(path: str, target: str):
    result = CliRunner().invoke(app, ["explain", target.format(path=path)])
    assert result.exit_code == 2
