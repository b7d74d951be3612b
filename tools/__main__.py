"""Lists the tools, and starts one by its short name.

./run_train.sh --help                    each name, with what it is for
./run_train.sh -m report outputs/tiny    starts tools/report.py
"""

import ast
import pathlib
import runpy
import sys

from config import command, nearest
from system import INPUT_IS_WRONG, print_error

TOOLS = pathlib.Path(__file__).parent
REPO = TOOLS.parent


def module_of(name: str) -> str:
    """The module of a tool's short name: `report` is tools.report. Returns other names
    unchanged."""
    path = TOOLS / name.replace(".", "/")
    if path.with_suffix(".py").exists() or (path / "__main__.py").exists():
        return f"tools.{name}"
    return name


def tools() -> dict[str, str]:
    """The purpose of each tool, by its short name. It is the first sentence of the tool's file."""
    purposes = {}
    for folder in (REPO / "checkpoint", TOOLS, *TOOLS.glob("*/")):
        for path in sorted(folder.glob("*.py")):
            text = path.read_text()
            is_part = folder not in (REPO, TOOLS) and (folder / "__main__.py").exists()
            if not text.endswith("run_tool(main)\n") or (is_part and path.stem != "__main__"):
                continue
            name = ".".join(path.relative_to(REPO).with_suffix("").parts)
            name = name.removeprefix("tools.").removesuffix(".__main__")
            docstring = ast.get_docstring(ast.parse(text)) or ""
            purposes[name] = docstring.replace("\n", " ").split(". ")[0].rstrip(".")
    return purposes


def main(name: str, words: list[str]) -> None:
    sys.argv[:] = [name, *words]
    path = REPO / f"{name}.py"
    if path.exists() and "__main__" not in path.read_text():
        problem = f"is not a command{nearest(name, tools())}; {command('--help')} lists the tools"
        print_error(f"-m {name}: {problem}")
        sys.exit(INPUT_IS_WRONG)
    try:
        runpy.run_module(module_of(name), run_name="__main__", alter_sys=True)
    except ImportError as error:
        lacks = error.name or name
        if lacks.split(".")[0] not in ("extras", name.split(".")[0]):
            raise
        problem = f"needs {lacks.replace('.', '/')}, which this copy does not have"
        if lacks == name.split(".")[0]:
            problem = f"no such tool{nearest(name, tools())}"
        print_error(f"-m {name}: {problem}; {command('--help')} lists the tools")
        sys.exit(INPUT_IS_WRONG)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1], sys.argv[2:])
    else:
        print("Tools, of which -m NAME --help says more:")
        for tool, purpose in tools().items():
            print(f"  {tool:18} {purpose}")
