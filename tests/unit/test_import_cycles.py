"""No module of the package imports itself through others: parsed from the source, so that imports for a type and those
inside a function count as well."""

import ast
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.unit.test_import_direction import PACKAGE


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def modules_imported(source: str, known: Collection[str]) -> set[str]:
    """Those of `known`, wherever the import stands. `from a import b` needs `a.b` where that is a module, else `a`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in names}
    return found.intersection(known)


def verify_no_cycle(sources: dict[str, str]) -> None:
    """Raises CycleError, which names the modules of a cycle. `sources` are by module."""
    graph = {module: modules_imported(source, sources) for module, source in sources.items()}
    TopologicalSorter(graph).prepare()


def test_no_module_imports_itself_through_others():
    verify_no_cycle({module_name(path): path.read_text() for path in PACKAGE.rglob("*.py")})


@pytest.mark.parametrize(
    "back",
    [
        "import a.one",
        "from a import one",
        "from a.one import X",
        "def f():\n    from a.one import X",
        "if TYPE_CHECKING:\n    from a.one import X",
    ],
)
def test_a_cycle_is_found_wherever_the_import_stands(back):
    with pytest.raises(CycleError):
        verify_no_cycle({"a": "", "a.one": "from a import two", "a.two": "from a.three import Y", "a.three": back})


def test_modules_of_one_package_may_import_each_other_in_one_direction():
    verify_no_cycle({"a": "from a.two import X", "a.one": "from a import two", "a.two": ""})
