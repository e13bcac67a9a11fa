"""How fast chat rows become packed tokens: rendered, checked, tokenized, packed; then the same from the cache, and after a kill.

python benchmarks/data_speed.py [--rows 100000] [--template chatml]

The rows are drawn from real instructions (PREHEAT_DATA, default ../shared/data): one to three turns, each row with a number of its own so
that no two are equal. Each measurement is a process of its own; CPU seconds stand beside wall-clock seconds, since on a busy machine only
these say what the work costs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SPECIAL = ["<|im_start|>", "<|im_end|>"]
UNMARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def make(folder: Path, data: Path, rows: int, template: str) -> None:
    """The rows, and a GPT-2 tokenizer with the template's special tokens."""
    import transformers

    known = json.loads((data / "instruct" / "alpaca_en_demo.json").read_text())
    draw = random.Random(0)
    with (folder / "rows.jsonl").open("w") as file:
        for n in range(rows):
            talk = []
            for turn in range(draw.choice((1, 1, 1, 2, 3))):
                row = draw.choice(known)
                talk.append({"role": "user", "content": f"{row['instruction']} {row['input']} ({n}.{turn})"})
                talk.append({"role": "assistant", "content": row["output"][: draw.randrange(200, 1200)]})
            file.write(json.dumps({"messages": talk}) + "\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(data / "tokenizers" / "gpt2"))
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    if template == "unmarked":
        tokenizer.chat_template = UNMARKED
    tokenizer.save_pretrained(folder / "tokenizer")


def read(folder: Path, template: str) -> None:
    """One reading, measured in this process; prints a JSON object."""
    from preheat.data import prepare
    from preheat.recipe import Data

    settings: dict[str, Any] = {} if template == "unmarked" else {"template": template}
    data = Data(source=str(folder / "rows.jsonl"), tokenizer=str(folder / "tokenizer"), **settings)
    begun, used = time.perf_counter(), time.process_time()
    made = prepare(data, length=2048, seed=0, cache=folder / "cache")
    counts = made.counts["train"]
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - begun,
                "cpu_seconds": time.process_time() - used,
                "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "tokens": counts["tokens"],
                "rows": counts["rows"],
                "trained": counts["trained"],
                "efficiency": counts["efficiency"],
                "fingerprint": made.fingerprint,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument(
        "--template",
        default="chatml",
        help="a format by name, or unmarked: a template whose mask is proven by rendering",
    )
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        return read(given.read, given.template)
    data = Path(os.environ.get("PREHEAT_DATA") or Path(__file__).parents[2] / "shared" / "data")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make(folder, data, given.rows, given.template)
        command = [sys.executable, __file__, "--read", str(folder), "--template", given.template]
        results = {
            "rows_read": given.rows,
            "template": given.template,
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
        }
        for name in ("first", "cached"):
            results[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for entry in (folder / "cache").glob("tokens-*"):
            entry.rename(folder / "whole")
        killed = subprocess.Popen(command, stdout=subprocess.PIPE)
        until = time.monotonic() + 0.7 * results["first"]["seconds"] + 5
        while time.monotonic() < until and killed.poll() is None:
            time.sleep(0.2)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        results["after a kill"] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        assert results["after a kill"]["fingerprint"] == results["first"]["fingerprint"]
    print(json.dumps(results, indent=1))
    return None


if __name__ == "__main__":
    main()
