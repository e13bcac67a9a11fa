"""Draws the answer of `preheat plan` for the README: runs the command on a terminal of 80 columns and writes docs/plan.svg.

python benchmarks/plan_picture.py
"""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMAND = ("plan", "Qwen/Qwen3-8B", "--gpu", "RTX-4090", "--method", "qlora")


def main() -> None:
    environment = {**os.environ, "COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    answer = subprocess.run(
        [sys.executable, "-m", "preheat", *COMMAND], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    screen = Console(record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    screen.print(Text.from_ansi(answer.stdout.rstrip("\n")))
    command = " ".join(("preheat", *COMMAND))
    drawing = screen.export_svg(title=command, clear=False)
    # Fonts of the reader's machine: a picture in a README loads nothing.
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL)
    drawing = drawing.replace("Fira Code", "Menlo, Consolas, DejaVu Sans Mono")
    # Not the command: a comment of XML must not contain two hyphens.
    drawing = drawing.replace(
        "Generated with Rich https://www.textualize.io", "Drawn by rich from the output of benchmarks/plan_picture.py"
    )
    Path(__file__).parents[1].joinpath("docs", "plan.svg").write_text(drawing, encoding="utf-8")
    print(screen.export_text())


if __name__ == "__main__":
    main()
