"""The figures of README and docs that are computed, written again or compared.

    python -m benchmarks.figures            writes docs/figures/ and the table in README.md
    python -m benchmarks.figures --check    exits with 1 and names what differs
"""

import argparse
import pathlib
import re
import sys
import tempfile

import config
from planner.devices import device
from planner.plan import Asked, planned
from planner.show import draw

REPO = pathlib.Path(__file__).parent.parent
TABLE = re.compile(r"(?<=<!-- benchmarks.figures: fit -->\n).*?(?=<!-- end -->)", re.S)
FIT = [("llama1b", 8, "H100"), ("llama8b", 8, "H100"), ("llama8b-float8", 8, "H100"), ("llama8b-h200", 1, "H200"),
       ("llama3.1-8b-128k", 8, "H100"), ("llama70b", 64, "H100"), ("llama8b-qlora", 1, "RTX4090"),
       ("llama70b-qlora", 8, "H100")]


def step_drawing() -> str:
    """Memory, computation and collectives over a step of Llama 3 8B on a node of H100s."""
    asked = Asked(device("H100"))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "step.svg"
        draw(*planned(config.load(str(REPO / "configs/llama8b.toml")), 8, asked, None), str(path),
             "Llama 3 8B on 8 x H100, one micro-batch", asked.memory_gib)
        return path.read_text()


def fit_table(rows: list[tuple[str, int, str]]) -> str:
    """Will it fit, and how fast is it? A row of Markdown for each configuration, number of GPUs and GPU."""
    lines = ["| configuration | GPUs | peak memory, GiB | tokens/s per GPU | MFU |", "|---|---|---|---|---|"]
    for name, ranks, gpu in rows:
        asked = Asked(device(gpu))
        row, _ = planned(config.load(str(REPO / f"configs/{name}.toml")), ranks, asked, None)
        lines.append(f"| `{name}` | {ranks} x {gpu} | {row['device_gib']:.1f} of {asked.memory_gib:g} | "
                     f"{row['tokens_per_second_per_device']:,.0f} | {row['mfu']:.0%} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare; write nothing")
    args = parser.parse_args()
    readme = REPO / "README.md"
    table = fit_table(FIT)
    wanted = {REPO / "docs/figures/step.svg": step_drawing(), readme: TABLE.sub(lambda _: table, readme.read_text())}
    different = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in different:
        print(f"{path.relative_to(REPO)}: {'differs' if args.check else 'written'}")
        if not args.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path])
    return int(args.check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
