"""The rules of the house that a machine can check: imports go down, one file knows GPUs, one file reads the host."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import minidist

ROOT = Path(minidist.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FLOORS = {  # DESIGN: what a file may import lies on its own floor or below
    "core": 1,
    "ranks": 1,
    "parallel": 2,
    "model": 2,
    "data": 2,
    "checkpoint": 3,
    "faults": 3,
    "plan": 4,
    "train": 4,
    "course": 5,
    "bench": 5,
    "doctor": 5,
    "cli": 6,
    "__main__": 6,
    "__init__": 0,
}
BY_FILE = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))


def part(path: Path) -> str:
    """The package of floor level that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    """Parts of minidist that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = {name.split(".")[1] for name in names if name.startswith("minidist.")}
    return {name for name in parts if name in FLOORS}


@BY_FILE
def test_imports_go_down_only(path):
    mine = part(path)
    for other in imported(ast.parse(path.read_text())):
        assert FLOORS[other] <= FLOORS[mine], f"{mine} (floor {FLOORS[mine]}) imports {other} (floor {FLOORS[other]})"
    if mine == "core":
        assert "ranks" not in imported(ast.parse(path.read_text()))


@BY_FILE
def test_only_core_device_speaks_of_gpus(path):
    if path != ROOT / "core" / "device.py":
        assert "cuda" not in path.read_text().lower(), "ask core.device"


@BY_FILE
def test_only_core_talks_to_torch_distributed(path):
    talks = any(
        isinstance(node, ast.Import | ast.ImportFrom) and "torch.distributed" in ast.unparse(node).replace("import ", "")
        for node in ast.walk(ast.parse(path.read_text()))
    )
    hears = path == ROOT / "course" / "recorder.py"  # sits on the process groups of graded ranks, and starts nothing
    hears = hears or path.parent == ROOT / "bench"  # names torch's engines, which it measures ours against
    assert not talks or hears or part(path) in ("core", "ranks", "doctor"), (
        "collectives go through core.comm, groups through core.mesh"
    )


@BY_FILE
def test_the_step_reads_devices_through_host_only(path):
    if part(path) not in ("train", "parallel", "model"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("item", "tolist"):
            assert _is_numpy(node), f"line {node.lineno}: read tensors on the host by core.device.host"


def _is_numpy(node: ast.Call) -> bool:
    """Tokenizers give numpy arrays, which live on the host anyway."""
    return "encode" in ast.unparse(node.func.value)


@BY_FILE
def test_files_and_functions_stay_readable(path):
    text = path.read_text()
    assert text.count("\n") <= 400, "the idea in it is two ideas"
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "say what the file is for in its first line"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"


def test_importing_the_package_is_cheap():
    """No torch, no Jupyter, no matplotlib: `minidist --help` has to answer at once."""
    code = "import sys, minidist.cli; print([m for m in ('torch', 'IPython', 'matplotlib', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_core_and_model_need_neither_jupyter_nor_plots():
    code = (
        "import sys, minidist.core.comm, minidist.parallel.parallelize, minidist.ranks\n"
        "print([m for m in ('IPython', 'matplotlib', 'ipywidgets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
