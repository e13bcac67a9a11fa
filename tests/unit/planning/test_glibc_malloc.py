"""The model of glibc's malloc against malloc itself."""

from __future__ import annotations

import platform
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from preheat.planning.memory.glibc_malloc import GlibcHeap

MIB = 1 << 20
# Allocates and writes the blocks of standard input, and prints the growth of the process at its peak, in KiB.
SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static long status(const char *name) {
  char line[256]; long value = 0; FILE *file = fopen("/proc/self/status", "r");
  while (fgets(line, 256, file)) if (!strncmp(line, name, 5)) sscanf(line + 6, "%ld", &value);
  fclose(file); return value;
}
int main(void) {
  static void *places[1000]; long block, size;
  free(malloc(4096));
  long before = status("VmRSS");
  while (scanf("%ld %ld", &block, &size) == 2) {
    if (size < 0) { free(places[block]); continue; }
    if (posix_memalign(&places[block], 64, size)) return 1;
    memset(places[block], 1, size);
  }
  printf("%ld\n", status("VmHWM") - before);
}
"""


def replay(log: list[tuple[int, int]]) -> int:
    heap, peak = GlibcHeap(), 0
    for block, size in log:
        if size > 0:
            heap.allocate(block, size)
        else:
            heap.free(block)
        peak = max(peak, heap.resident)
    return peak


def draw_log(seed: int) -> list[tuple[int, int]]:
    """Returns 300 allocations and frees, with sizes below and above the largest threshold."""
    draw, log, living = random.Random(seed), [], dict[int, int]()
    for number in range(300):
        if living and (draw.random() < 0.5 or sum(living.values()) > 120 * MIB):
            block = draw.choice(list(living))
            log.append((block, -living.pop(block)))
        else:
            size = draw.choice([200 << 10, MIB, 6 * MIB, 6 * MIB, 8 * MIB, 12 * MIB, int(draw.uniform(0.1, 40) * MIB)])
            living[number] = size
            log.append((number, size))
    return log


def test_a_freed_block_is_too_small_for_its_like() -> None:
    size = 8 * MIB
    # The mapping that is freed raises the threshold, so that the others are in the heap.
    log = [(0, size), (0, -size), (1, size), (2, size), (1, -size), (3, size)]
    assert replay(log) == pytest.approx(3 * size, rel=1e-3)
    # Above the largest threshold each block is returned to the system.
    large = 33 * MIB
    log = [(0, large), (0, -large), (1, large), (2, large), (1, -large), (3, large)]
    assert replay(log) == pytest.approx(2 * large, rel=1e-3)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_random_blocks_take_as_much_as_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "replay.c").write_text(SOURCE)
    subprocess.run(["cc", "-o", "replay", "replay.c"], cwd=tmp_path, check=True, capture_output=True)
    for seed in range(3):
        log = draw_log(seed)
        text = "".join(f"{block} {size}\n" for block, size in log)
        measured = subprocess.run([tmp_path / "replay"], input=text, capture_output=True, text=True, check=True)
        assert replay(log) == pytest.approx(int(measured.stdout) << 10, rel=0.06)
