"""HTML report of a run: `report.html`, self-contained and offline, and its figures as data in `report.json`.

    run folder ──report_data.collect──▶ figures (report.json) ──run_page.render──▶ report.html
                                                                  └─ plots: SVG with the page's CSS colours

Works at any time: for a running run, a failed one, and one that has not taken a step.
"""

from preheat.report.bench_page import write_bench
from preheat.report.data_page import list_cleaning, write_data
from preheat.report.inference_page import write_inference
from preheat.report.run_page import write

__all__ = ["list_cleaning", "write", "write_bench", "write_data", "write_inference"]
