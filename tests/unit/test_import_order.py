"""The import order of DESIGN section 2 and the rules that keep it true, read from the source.

A file above 500 lines or a function above 80 must say why: a line `Long: …` in its docstring.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megamem"
ORDER = (
    "errors", "platform", "config", "layout", "ops", "stream", "convert", "models", "diffusion", "rollout",
    "objectives", "tasks", "train", "plan", "bench", "cli",
)  # fmt: skip
BACKEND_WORDS = ("cuda", "nccl", "gloo")
# Words that a user types, not questions to a device. (file, the whole string)
USER_WORDS = {("config/schema.py", "cuda")}  # the values of `device`
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def level(name: str) -> str:
    """`ops/vocab.py`, `errors.py` -> `ops`, `errors`."""
    return name.split("/")[0].removesuffix(".py")


def imported_levels(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, level) of everything of megamem that a file imports, wherever in the file."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            root, _, rest = name.partition(".")
            if root == "megamem" and rest and rest != "__version__":
                yield node.lineno, rest.split(".")[0]


def order_faults(name: str, tree: ast.AST) -> list[str]:
    own = ORDER.index(level(name))
    return [
        f"{name}:{line} imports {target}, which is not above {level(name)}"
        for line, target in imported_levels(tree)
        if target not in ORDER[: own + 1]
    ]


def docstrings(tree: ast.AST) -> set[ast.Constant]:
    return {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def identifiers(node: ast.AST) -> list[str]:
    """The names that a node itself writes down."""
    texts = (getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname", "module"))
    return [text for text in texts if isinstance(text, str)]


def backend_faults(name: str, tree: ast.AST) -> list[str]:
    told = docstrings(tree)
    faults = []
    for node in ast.walk(tree):
        texts = identifiers(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in told:
            texts = [node.value]
        faults += [
            f"{name}:{node.lineno} says {text!r}"
            for text in texts
            if any(word in text.lower() for word in BACKEND_WORDS) and (name, text) not in USER_WORDS
        ]
    return faults


def mentions(tree: ast.AST, word: str) -> list[int]:
    return [node.lineno for node in ast.walk(tree) if any(word in text.split(".") for text in identifiers(node))]


def size_faults(name: str, source: str) -> list[str]:
    tree = ast.parse(source)
    units = [(name, tree, len(source.splitlines()), 500)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            units.append((f"{name}:{node.name}", node, node.end_lineno - node.lineno + 1, 80))
    return [
        f"{what}: {lines} lines, allowed {most}, and no reason (a line `Long: …` in its docstring)"
        for what, node, lines, most in units
        if lines > most and "\nLong: " not in (ast.get_docstring(node) or "")
    ]


def test_every_folder_has_its_place():
    assert {level(name) for name in FILES} - {"__init__"} <= set(ORDER)


@pytest.mark.parametrize("name", FILES)
def test_imports_come_from_above(name):
    if level(name) != "__init__":
        assert not order_faults(name, TREES[name])


@pytest.mark.parametrize("name", [name for name in FILES if level(name) != "platform"])
def test_only_platform_names_backends(name):
    assert not backend_faults(name, TREES[name])


def test_only_groups_reads_parallel_state():
    readers = {name for name, tree in TREES.items() if mentions(tree, "parallel_state") or mentions(tree, "mpu")}
    assert readers == {"platform/groups.py"}


def test_dense_masks_are_for_the_reference_only():
    """DESIGN section 1: no S x S mask outside the test reference."""
    readers = {name for name, tree in TREES.items() if mentions(tree, "dense_mask")}
    assert readers == {"layout/dense.py", "ops/attention.py"}
    functions = {n.name: n for n in ast.walk(TREES["ops/attention.py"]) if isinstance(n, ast.FunctionDef)}
    assert [name for name, node in functions.items() if mentions(node, "dense_mask")] == ["naive_attend"]


@pytest.mark.parametrize("name", FILES)
def test_sizes(name):
    assert not size_faults(name, FILES[name].read_text(encoding="utf-8"))


LIGHT = ["megamem", "megamem.errors", "megamem.platform.launch", "megamem.layout.packing", "megamem.ops.attention_plan"]
LIGHT += ["megamem.stream.schedule", "megamem.stream.simulate", "megamem.stream.trace"]
LIGHT += ["megamem.config." + path.stem for path in sorted((PACKAGE / "config").glob("[!_]*.py"))]


def test_configuration_imports_without_torch():
    """So that a typo is told in a second, and on a machine without torch."""
    code = f"import sys, {', '.join(LIGHT)}\nprint([m for m in ('torch', 'megatron') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("convert/x.py", "def f():\n    from megamem.models.spec import SPECS", True),
        ("convert/x.py", "from megamem import models", True),
        ("convert/x.py", "import megamem.cli.main", True),
        ("convert/x.py", "from megamem.convert.maps import Plain\nfrom megamem.errors import UserError", False),
        ("ops/x.py", "from megamem.unheard_of import y", True),
    ],
)
def test_order_faults_are_seen(name, source, found):
    assert bool(order_faults(name, ast.parse(source))) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x.cuda()", True),
        ("torch.cuda.synchronize()", True),
        ("f(device=f'cuda:{i}')", True),
        ("from torch.cuda import nvtx", True),
        ("init('nccl')", True),
        ("def f():\n    'about cuda'  # cuda\n    return x.device", False),
    ],
)
def test_backend_faults_are_seen(source, found):
    assert bool(backend_faults("ops/x.py", ast.parse(source))) == found


def test_size_faults_are_seen():
    body = "    x = 1\n" * 80
    assert size_faults("x.py", "def f():\n" + body)
    assert not size_faults("x.py", 'def f():\n    """One table.\n\n    Long: it is a table.\n    """\n' + body)
    assert size_faults("x.py", "x = 1\n" * 501)
