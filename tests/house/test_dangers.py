"""Product code never runs bytes that came from elsewhere, never forks, and never swallows an error."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.tree import ROOT, parse, product

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {
    *("eval", "exec", "torch.load", "numpy.load", "np.load", "yaml.load", "os.system", "os.popen", "os.fork"),
    *("tempfile.mktemp", "ssl._create_unverified_context"),
}
BROAD = {"Exception", "BaseException"}


def dangers(tree: ast.Module) -> list[str]:
    """What the module does that it must not, as `line: what`."""
    return [f"{getattr(item, 'lineno', 0)}: {what}" for item in ast.walk(tree) for what in judge(item)]


def judge(item: ast.AST) -> Iterator[str]:
    """The names of the dangers in one node of a syntax tree."""
    match item:
        case ast.Import(names=names):
            yield from (alias.name for alias in names if alias.name.split(".")[0] in MODULES)
        case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
            yield module
        case ast.Call():
            yield from judge_call(item)
        case ast.ExceptHandler(type=None):
            yield "bare except"
        case ast.ExceptHandler(type=kind, body=body) if is_broad(kind) and not any(map(does_something, body)):
            yield "swallowed exception"


def judge_call(call: ast.Call) -> Iterator[str]:
    """The dangers in one call."""
    name = ast.unparse(call.func)
    if name in CALLS:
        yield name
    if name.endswith("suppress") and any(map(is_broad, call.args)):
        yield "swallowed exception"
    for keyword in call.keywords:
        if keyword.arg in {"shell", "allow_pickle", "trust_remote_code"} and ast.unparse(keyword.value) == "True":
            yield f"{keyword.arg}=True"
    literals = {argument.value for argument in call.args if isinstance(argument, ast.Constant)}
    if name.endswith(("get_context", "set_start_method")) and literals & {"fork", "forkserver"}:
        yield "fork"


def is_broad(kind: ast.expr | None) -> bool:
    """Whether an except clause or `suppress` names everything."""
    return kind is not None and any(isinstance(part, ast.Name) and part.id in BROAD for part in ast.walk(kind))


def does_something(statement: ast.stmt) -> bool:
    """Whether a statement is more than `pass`, `...`, `continue` or a docstring."""
    return not (
        isinstance(statement, ast.Pass | ast.Continue)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    )


@pytest.mark.parametrize("path", product(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_dangers(path: Path) -> None:
    assert dangers(parse(path)) == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("from cloudpickle import dumps", "cloudpickle"),
        ("def f():\n  import torch\n  return torch.load(p)", "torch.load"),
        ("eval('1')", "eval"),
        ("yaml.load(text)", "yaml.load"),
        ("np.load(p, allow_pickle=True)", "allow_pickle=True"),
        ("subprocess.run(c, shell=True)", "shell=True"),
        ("multiprocessing.get_context('fork')", "fork"),
        ("os.fork()", "os.fork"),
        ("try:\n  f()\nexcept:\n  raise", "bare except"),
        ("try:\n  f()\nexcept Exception:\n  pass", "swallowed exception"),
        ("try:\n  f()\nexcept (ValueError, BaseException):\n  ...", "swallowed exception"),
        ("with contextlib.suppress(Exception):\n  f()", "swallowed exception"),
    ],
)
def test_planted_dangers_are_caught(source: str, what: str) -> None:
    assert what in [danger.split(": ", 1)[1] for danger in dangers(ast.parse(source))]


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "json.loads(text)",
        "try:\n  f()\nexcept Exception as error:\n  report(error)",
        "try:\n  f()\nexcept OSError:\n  pass",
        "with contextlib.suppress(ProcessLookupError):\n  f()",
        "multiprocessing.get_context('spawn')",
    ],
)
def test_harmless_code_is_left_alone(source: str) -> None:
    assert dangers(ast.parse(source)) == []
