"""A run as one page: `report.html`, self-contained and offline, and its figures as data in `report.json`.

    run folder ──figures.collect──▶ figures (report.json) ──page.render──▶ report.html
                                                └─ plots: SVG whose colours are the page's variables

Works at any time: for a run that goes on, one that failed, and one that has not taken a step.
"""

from preheat.report.bench_page import write_bench
from preheat.report.data_page import write_data
from preheat.report.inference_page import write_inference
from preheat.report.run_page import write

__all__ = ["write", "write_bench", "write_data", "write_inference"]
