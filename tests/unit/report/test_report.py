"""The report says what the run recorded, in one file that needs nothing else and obeys nothing that the run wrote."""

import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from preheat.core import MachineUse
from preheat.core.plan import Cost, Energy
from preheat.core.run_records import (
    Baseline,
    Estimate,
    EvaluationMetrics,
    Failed,
    Finished,
    Measured,
    OtherEvent,
    Resumed,
    SampleEvent,
    SampleTexts,
    Started,
    StepMetrics,
    Stopping,
    Usage,
)
from preheat.errors import RunError
from preheat.files import to_plain_data
from preheat.report import formatting, svg, write
from preheat.report.usage import sum_usage
from preheat.run.reader import Reader
from preheat.run.writer import Writer
from tests.unit.plans import values_of

SECTIONS = [
    "verdict",
    "loss",
    "evaluation",
    "over-time",
    "memory",
    "techniques",
    "samples",
    "timeline",
    "environment",
    "recipe",
]
PLAN = values_of(
    *(1.02, 8.0),
    memory={
        "parameters": 0.1,
        "gradients": 0.1,
        "optimizer": 0.2,
        "activations": 0.5,
        "temporary": 0.1,
        "overhead": 0.02,
    },
    phases={"forward": 0.8, "backward": 1.02},
    tokens_per_second=4000.0,
    parameters={"total": 15_000_000, "active": 15_000_000, "trained": 15_000_000},
    overhead={"process": 0.02},
    steps=60,
)
MEASURED = {"peak_gib": 1.05, "tokens_per_second": 3800.0, "seconds_per_step": 0.1, "mfu": 0.5}


def run_folder(
    path: Path,
    *,
    steps: int = 60,
    losses: dict[int, float] | None = None,
    plan: bool = True,
    events: bool = True,
    name: str = "small",
) -> Path:
    writer = Writer(path)
    writer.write_text("recipe.yaml", f"name: {name}\nmodel: {{family: llama}}\ndata: {{source: stdlib}}\n")
    if plan:
        writer.write_json("plan.json", PLAN)
        writer.write_json("changes.json", {"lora": [{"what": "adapters on 6 layers", "count": 24, "kernel": "peft"}]})
        writer.write_json(
            "environment.json", {"machine": {"device": "Some CPU"}, "versions": {"torch": "2.13.0"}, "threads": 2}
        )
    if events:
        writer.write_event(Started(step=0))
        writer.write_event(Baseline(unigram=6.55, bigram=4.10, vocabulary=4096))
    for step in range(1, steps + 1):
        loss = (losses or {}).get(step, 3 + 5 * math.exp(-step / 10))
        line = StepMetrics(
            step=step,
            tokens=step * 100,
            loss=loss,
            lr=1e-3,
            gradient_norm=1.0,
            seconds=0.5,
            tokens_per_second=3800.0 + step,
            memory=2**28,
            elapsed=step / 2,
        )
        writer.write_metric(line)
        if step % 20 == 0:
            writer.write_metric(EvaluationMetrics(step, validation_loss=loss + 0.1, tokens=step * 100))
    if events:
        writer.write_event(Measured(**MEASURED))
        writer.write_event(SampleEvent(prompt="def f", text="(x):\n    return x"))
        end = Finished(steps=steps, loss=3.5, validation_loss=3.6, tokens=steps * 100, seconds=steps / 2)
        writer.write_event(end)
    writer.close()
    return path


def test_before_and_after_stand_with_their_intervals(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run")
    both = {"value": 4.5, "low": 4.25, "high": 4.75}
    one = {
        "rows": 7,
        "tokens": 99,
        "truncated": 2,
        "metrics": {"bits_per_byte": both, "accuracy": {"value": 0.5, "low": None, "high": None}},
    }
    less = {"paired": True, "metrics": {"bits_per_byte": {"value": -1.5, "low": -2.0, "high": -1.0}}}
    summary = {
        "step": 60,
        "before": {"texts": {"<b>own": one}},
        "after": {"texts": {"<b>own": one}},
        "difference": {"texts": {"<b>own": less}},
    }
    (path / "evaluation.json").write_text(json.dumps(summary))
    with (path / "metrics.jsonl").open("a") as file:
        for step, value in ((0, 0.25), (60, 0.5)):
            file.write(
                json.dumps(
                    {
                        "step": step,
                        "validation_loss": 4.0,
                        "forgetting_loss": 2.0,
                        "tasks": {"arc": {"accuracy": value}},
                    }
                )
                + "\n"
            )
    text = " ".join(Page(write(path)).text.split())
    assert "<b>own: 7 rows (2 without room for all of their context)" in text
    assert "4.500 [4.250, 4.750]" in text
    assert "\u22121.500 [\u22122.000, \u22121.000]" in text
    assert "arc: accuracy" in text
    assert "From 0.25 at step 0 to 0.5 at step 60." in text


def test_a_resumed_run_says_which_session_its_measurements_are_of(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run")
    once = " ".join(Page(write(path)).text.split())
    assert "Measured over the run: 3,800." in once
    assert "session" not in once.partition("Timeline")[0]
    with (path / "events.jsonl").open("a") as file:
        for event in (
            {"kind": "resumed"},
            {**MEASURED, "kind": "measured", "tokens_per_second": 100.0},
            {"kind": "resumed"},
        ):
            file.write(json.dumps({"time": 0, "step": 60, **event}) + "\n")
    text = " ".join(Page(write(path)).text.split())
    assert "Measured in session 2 of 3." in text
    assert "Measured in session 2 of 3: 100." in text
    assert "Measured peak in session 2 of 3: 1.05 GiB." in text


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (to_plain_data(MachineUse(60, 0.4, 1.6, 2, 2)), " on average 1.6 cores, so it does not correct later plans."),
        (to_plain_data(MachineUse(60, 1.9, 0.1, 2, 2)), None),
        (to_plain_data(MachineUse(60, 1.9, None, 2, 2)), None),
        ({"alone": False}, " the cores, so it does not correct later plans."),  # an incomplete note
        (None, None),
    ],
)
def test_a_speed_measured_beside_other_work_is_said_to_be(machine: Any, said: str | None, tmp_path: Path) -> None:
    from rich.console import Console

    from preheat.cli.train import _build_summary

    path = run_folder(tmp_path / "run")
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 0, "step": 60, "kind": "measured", **MEASURED, "machine": machine}) + "\n")
    text = " ".join(Page(write(path)).text.split())
    beside = "The speed was measured while other processes used"
    assert (f"{beside}{said}" in text) if said else (beside not in text)
    if machine and "cpus" in machine:
        result = {**MEASURED, "machine": machine, "predicted": MEASURED, "stopped": None, "steps": 60, "run": "r"}
        console = Console(width=200, file=io.StringIO())
        console.print(_build_summary(result | {"report": "r.html", "loss": 1.0, "validation_loss": 1.0}))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("measured while other processes used 1.6 of 2 cores" in shown) == bool(said)


class Page(HTMLParser):
    """Tags with their attributes, ids, and the text a reader sees."""

    def __init__(self, path: Path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._hidden = False
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._hidden = tag == "style"

    def handle_endtag(self, tag):
        self._hidden = False

    def handle_data(self, data):
        if not self._hidden:
            self.text += data + " "

    @property
    def ids(self) -> list[str]:
        return [found for _, attributes in self.tags if (found := attributes.get("id"))]

    @property
    def drawings(self) -> list[ElementTree.Element]:
        return [ElementTree.fromstring(drawing) for drawing in re.findall(r"<svg.*?</svg>", self.source, re.DOTALL)]


def test_every_section_stands_in_order_and_the_figures_are_those_of_the_run(tmp_path):
    path = run_folder(tmp_path / "run")
    assert write(path) == path / "report.html"
    page = Page(path / "report.html")
    assert [i for i in page.ids if i in SECTIONS] == [name for name in SECTIONS if name != "evaluation"], (
        "none is recorded"
    )
    for said in (
        "Predicted 1.02 GiB, measured 1.05 GiB (−3 %)",
        "Predicted 4,000 tokens/s, measured 3,800 (+5 %)",
        "15 M parameters",
        "3.600",
        "adapters on 6 layers",
        "Some CPU",
    ):
        assert said in " ".join(page.text.split())
    data = json.loads((path / "report.json").read_text())
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for key in ("step", "loss", "lr", "gradient_norm", "tokens_per_second", "memory"):
        assert data["curves"][key] == [m[key] for m in metrics if "loss" in m]
    assert data["evaluations"] == [m for m in metrics if "validation_loss" in m]
    assert data["memory"] == PLAN["memory"]
    assert data["measured"] == MEASURED
    assert data["difference"]["peak_gib"] == pytest.approx(1.02 / 1.05 - 1)
    assert data["baseline"] == {"unigram": 6.55, "bigram": 4.10, "vocabulary": 4096}
    assert (data["summary"]["loss"], data["summary"]["validation_loss"], data["state"]["kind"]) == (
        3.5,
        3.6,
        "finished",
    )


def test_the_page_needs_nothing_from_outside_and_runs_nothing(tmp_path):
    page = Page(write(run_folder(tmp_path / "run")))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "base"}
    ids = page.ids
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        assert "src" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        if "href" in attributes:
            assert attributes["href"][1:] in ids  # a mark of the same drawing
            assert attributes["href"].startswith("#")
    assert "http" not in page.source.replace("http-equiv", "")
    assert "@import" not in page.source
    assert {target[1:] for target in re.findall(r"url\(([^)]*)\)", page.source)} <= set(ids)


def test_drawings_are_xml_say_their_figure_and_take_colours_from_the_page_only(tmp_path):
    page = Page(write(run_folder(tmp_path / "run")))
    drawings = page.drawings
    assert len(drawings) == 7  # loss, wide and narrow; rate, norm, tokens/s, memory over time; memory at the peak
    defined = set(re.findall(r"(--[\w-]+):", page.source))
    for drawing in drawings:
        assert len(drawing.attrib["aria-label"]) > 20
        source = ElementTree.tostring(drawing, encoding="unicode")
        assert not re.search(r"#[0-9a-f]{6}\b", source)
        assert set(re.findall(r"var\((--[\w-]+)\)", source)) <= defined
        shown = [e for e in drawing.iter() if e.tag in ("text", "use")]
        assert shown
        assert all("var(--" in e.attrib["style"] for e in shown)
    said = ["".join(text for text in drawing.itertext()) for drawing in drawings]
    assert all(level in said[0] for level in ("uniform 8.32", "unigram 6.55", "bigram 4.10"))


def test_a_resumed_writer_ends_half_a_line_and_adds_folders(tmp_path, monkeypatch):
    path = run_folder(tmp_path / "run")
    lines = (path / "events.jsonl").read_text()
    (path / "events.jsonl").write_text(lines + '{"kind": "ha')
    writer = Writer(path, resume=True)
    # A long run's file is not read to find out how it ends.
    monkeypatch.setattr(Path, "read_bytes", None)
    writer.write_event(Resumed(step=60))
    monkeypatch.undo()
    for name in ("one", "two"):
        writer.write_folder(name, lambda folder: (folder / "a.txt").write_text("a"))
    writer.close()
    *_, half, last = (path / "events.jsonl").read_text().splitlines()
    assert half == '{"kind": "ha'
    assert json.loads(last)["kind"] == "resumed"
    assert {"one/a.txt", "two/a.txt"} <= set(writer._mark.files)


def test_what_the_run_wrote_is_shown_not_obeyed(tmp_path):
    path = run_folder(tmp_path / "run", name='"</title><script>alert(1)</script>"')
    writer = Writer(path, resume=True)
    writer.write_event(Resumed(step=60))
    writer.write_event(OtherEvent(kind="<i>odd</i>", values={"reason": "</td><img src=x onerror=alert(1)>"}))
    writer.write_event(SampleEvent(prompt="</pre><script>", text="\x1b[31m\x00\u202eevil \ud800 <b onclick=x>'\"&amp;"))
    writer.write_json("changes.json", {"<i>t</i>": [{"what": "<svg onload=x>", "count": 1, "kernel": "<u>"}]})
    writer.write_json("plan.json", PLAN | {"memory": {"<a>": 1.0, "$x_$": 0.02}, "phases": {"<a href=x>": 1.0}})
    writer.close()
    page = Page(write(path))
    assert not {tag for tag, _ in page.tags} & {"script", "img", "i", "u", "a"}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "<b onclick=x>'\"&amp;" in page.text
    assert "␛[31m␀\ufffdevil \ufffd" in page.text
    assert json.loads((path / "report.json").read_text())["samples"][0]["prompt"] == "</pre><script>"


def test_samples_of_a_pretrained_model_stand_before_and_after(tmp_path):
    path = run_folder(tmp_path / "run", events=False)
    chat = [{"role": "user", "content": "<Hi>"}]
    writer = Writer(path, resume=True)
    writer.write_event(Started())
    for step, said in ((0, "base"), (60, "tuned")):
        for prompt in ("once", chat):
            writer.write_event(SampleEvent(step=step, prompt=prompt, text=f"{said} {len(prompt)}"))
    writer.write_event(Resumed(step=60))
    writer.write_event(SampleEvent(step=90, prompt="once", text="tuned more"))
    writer.write_event(SampleEvent(step=90, prompt="another", text="new"))
    writer.close()
    assert Reader(path).samples() == [
        SampleTexts("once", before="base 4", text="tuned more"),
        SampleTexts("another", before=None, text="new"),
    ]
    text = Page(write(path)).text
    assert (
        text.index("Before training") < text.index("base 4") < text.index("After training") < text.index("tuned more")
    )
    events = (path / "events.jsonl").read_text().splitlines()
    (path / "events.jsonl").write_text(
        "\n".join(events[: next(n for n, e in enumerate(events) if '"step": 60' in e)]) + "\n"
    )
    assert [sample.text for sample in Reader(path).samples()] == [None, None], "trained no further yet"
    assert "user: <Hi>" in Page(write(path)).text


def test_a_run_without_an_end_says_so_and_what_is_missing_is_left_out(tmp_path):
    page = Page(write(run_folder(tmp_path / "bare", steps=0, plan=False, events=False)))
    assert [i for i in page.ids if i in SECTIONS] == ["verdict", "loss", "recipe"]
    assert "Not started" in page.text
    assert "not recorded" not in page.text.lower()
    assert not {tag for tag, _ in page.tags} & {"table", "svg"}
    path = run_folder(tmp_path / "one", steps=1, plan=False, events=False)
    page = Page(write(path))
    assert "still running, or it was killed" in page.text
    assert "from step 1." in page.text
    for kind, event, said in (
        ("failed", Failed(reason="out of memory"), "out of memory"),
        ("stopped", Stopping(signal="SIGTERM"), "SIGTERM"),
        ("open", None, "No end is recorded"),
    ):
        writer = Writer(path, resume=True)
        writer.write_event(Resumed(step=1))
        if event:
            writer.write_event(event)
        writer.close()
        page = Page(write(path))
        assert json.loads((path / "report.json").read_text())["state"]["kind"] == kind
        assert said in page.text


def test_losses_that_are_not_finite_are_named_and_the_data_stays_strict_json(tmp_path):
    path = run_folder(tmp_path / "run", losses={7: math.nan, 60: math.inf}, events=False)
    page = Page(write(path))
    assert "not finite at steps 7, 60" in page.text
    assert "The loss is not finite" in page.text

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads((path / "report.json").read_text(), parse_constant=refuse)
    assert data["not_finite"] == [7, 60]
    assert data["curves"]["loss"][6] is None
    every = run_folder(
        tmp_path / "every", steps=3, losses={1: math.nan, 2: math.nan, 3: math.nan}, plan=False, events=False
    )
    assert "No step has a finite training loss" in Page(write(every)).text


def test_the_same_run_gives_the_same_page_and_leaves_the_settings_of_plots_alone(tmp_path):
    import matplotlib

    path = run_folder(tmp_path / "run")
    before = dict(matplotlib.rcParams)
    first = write(path).read_bytes()
    with matplotlib.rc_context({"xtick.labelsize": 30, "svg.fonttype": "path"}):
        assert write(path).read_bytes() == first
    assert dict(matplotlib.rcParams) == before


def test_a_missing_run_is_one_clear_line_and_a_damaged_file_is_named(tmp_path):
    with pytest.raises(RunError, match="is not a run"):
        write(tmp_path)
    path = run_folder(tmp_path / "run")
    (path / "plan.json").write_text("{cut")
    (path / "recipe.yaml").write_bytes(b"\xff")
    with (path / "events.jsonl").open("a") as file:
        file.write('3\n{"step": 1}\n{"kind": "finished", "steps": "x"}\n')
    page = Page(write(path))
    assert "plan.json: left out: not JSON" in page.text
    (path / "plan.json").write_text(json.dumps({k: v for k, v in PLAN.items() if k != "in_use_gib"}))
    other = Page(write(path)).text
    assert "plan.json: left out: in_use_gib: " in other
    assert "Field required (damaged, or of another version of preheat)" in other
    assert "events.jsonl: left out line" in page.text
    assert "recipe.yaml: left out" in page.text
    assert "and 2 more" in page.text
    figures = json.loads((path / "report.json").read_text())
    assert figures["state"]["kind"] == "finished"
    assert len(figures["curves"]["loss"]) == 60, "the rest is as it was"


def test_a_report_does_not_replace_a_page_of_somebody_else(tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: mine\n")
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(RunError, match="preheat did not write it"):
        write(tmp_path)
    assert (tmp_path / "report.html").read_text() == "mine"
    assert not (tmp_path / "report.json").exists()


def test_thinning_keeps_spikes_and_gaps_and_smoothing_is_the_mean():
    x = [float(i) for i in range(50_000)]
    y = [0.0] * 50_000
    y[31_234], y[40_000] = 9.0, -9.0
    y[10_000:20_000] = [math.nan] * 10_000
    kept_x, kept_y = svg.downsample(x, y, 400)
    assert len(kept_x) <= 402
    assert (31_234.0, 9.0) in zip(kept_x, kept_y, strict=True)
    assert min(v for v in kept_y if math.isfinite(v)) == -9.0
    assert any(math.isnan(v) for v in kept_y)
    line = [2.0 * i for i in range(30)]
    assert svg.smooth(line, 4)[:26] == pytest.approx(line[:26])  # an even window leaves a straight line where it is
    assert svg.smooth([1.0, math.nan, 3.0, 5.0], 1)[2:] == [4.0, 4.0]


@pytest.mark.parametrize("mode", [0, 1])
def test_text_has_contrast_in_light_and_dark(mode):
    """WCAG 2: 4.5 to 1 for text, 3 to 1 for lines of a plot."""
    css = Path(svg.__file__).with_name("page.css").read_text()
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", re.findall(r":root \{(.*?)\}", css, re.DOTALL)[mode]))
    assert set(svg.COLOURS) <= set(colours)

    def luminance(name: str) -> float:
        parts = [int(colours[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def contrast(one: str, other: str) -> float:
        high, low = sorted((luminance(one), luminance(other)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for text, ground in (
        ("ink", "page"),
        ("ink", "panel"),
        ("muted", "page"),
        ("muted", "panel"),
        ("warn", "page"),
        ("warn", "warn-panel"),
        ("series-1", "panel"),
    ):
        assert contrast(text, ground) >= 4.5, (text, ground)
    for n in range(1, 7):
        assert contrast(f"series-{n}", "page") >= 3


def test_numbers_in_words():
    assert [formatting.format_duration(s) for s in (0.04, 9.996, 59.6, 3725, 90061)] == [
        "40 ms",
        "10 s",
        "1 min",
        "1 h 2 min",
        "1 d 1 h",
    ]
    assert [formatting.format_gib(g) for g in (1.0512, 0.0334, 139.2, None)] == [
        "1.05 GiB",
        "34.2 MiB",
        "139.2 GiB",
        "not recorded",
    ]
    assert [formatting.format_gib(g) for g in (-1.5e-05, 0.9, 0.99999, 2e15)] == [
        "\u22120.02 MiB",
        "922 MiB",
        "1.00 GiB",
        "2e+15 GiB",
    ]
    assert formatting.format_sizes([0.3, 0.0005, -1.5e-07, None]) == ("MiB", ["307.2", "0.5", "0", "not recorded"])
    assert formatting.format_sizes([0.3, 12.0]) == ("GiB", ["0.30", "12.00"])
    assert [formatting.format_change(v, 0.055) for v in (-1.5e-05, 0.0, -0.02)] == ["0", "0", "\u22120.0200"]
    assert formatting.format_interval(Estimate(-0.0002, -0.1, 0.0004), signed=True) == "0.000 [\u22120.100, 0.000]"
    assert [formatting.format_clock(s) for s in (0.4, 3725.4, 360000, -1, math.nan)] == [
        "0:00:00",
        "1:02:05",
        "100:00:00",
        *["not recorded"] * 2,
    ]
    assert [formatting.read_number(n) for n in (10**400, -math.inf, True, "3")] == [None] * 4
    assert [formatting.count(n) for n in (1, 9999, 15_120_000, 999_999_999)] == ["1", "9,999", "15.1 M", "1 B"]
    assert formatting.format_loss(math.nan) == "not finite"
    assert formatting.format_signed_percent(-0.029) == "−3 %"
    assert formatting.format_signed_percent(-0.001) == "0 %"
    assert formatting.relative_error(1.0, 0.0) is None


def test_the_command_prints_the_path_or_one_json_object(tmp_path):
    import typer
    from typer.testing import CliRunner

    from preheat.cli.report import report

    app = typer.Typer()
    app.command()(report)
    one, two = run_folder(tmp_path / "one", steps=2), run_folder(tmp_path / "two", steps=2)
    plain = CliRunner().invoke(app, [str(one), str(two)])
    assert plain.stdout.split() == [str(one / "report.html"), str(two / "report.html")]
    found = json.loads(CliRunner().invoke(app, [str(one), "--json"]).stdout)
    assert found == {
        "reports": [{"run": str(one), "report": str(one / "report.html"), "data": str(one / "report.json")}]
    }


def write_usage(run: Path, *usages: Usage) -> None:
    writer = Writer(run, resume=True)
    for usage in usages:
        writer.write_system(60, {}, usage)
    writer.close()


def test_energy_and_cost_stand_beside_their_predictions(tmp_path):
    run = run_folder(tmp_path / "run")
    energy, cost = Energy(0.7, 0.1, 3.0), Cost(2.0, 0.1, 9.0)
    (run / "plan.json").write_text(json.dumps({**PLAN, "energy": vars(energy), "cost": vars(cost)}))
    priced = Usage(
        device_hours=5.0, energy_kwh=2.5, energy_sources=("nvml",), cost=10.0, currency="EUR", price_per_hour=2
    )
    write_usage(run, Usage(device_hours=1.0), priced)
    page, figures = write(run).read_text(), json.loads((run / "report.json").read_text())
    assert figures["usage"] == to_plain_data(priced)
    assert figures["difference"]["energy_kwh"] == pytest.approx(0.2)
    assert figures["difference"]["cost"] == pytest.approx(-0.1)
    for text in (
        "2.5 kWh",
        "by nvml; predicted 3 kWh (+20\u00a0%)",
        "10 EUR",
        "5 device-hours; predicted 9 EUR (−10\u00a0%)",
    ):
        assert text in page
    # Of a run that goes on, only a part of the prediction has been used.
    writer = Writer(run, resume=True)
    writer.write_event(Resumed(step=60))
    writer.close()
    assert "predicted 9 EUR for the whole run" in write(run).read_text()


def test_a_folder_of_runs_is_summed_over_what_is_known(tmp_path):
    import typer
    from typer.testing import CliRunner

    from preheat.cli.report import report

    app = typer.Typer()
    app.command()(report)
    for name, usages in {
        "a": [
            Usage(
                device_hours=8.0,
                energy_kwh=4.0,
                energy_sources=("nvml",),
                cost=16.0,
                currency="USD",
                price_per_hour=2.0,
            )
        ],
        "deep/b": [Usage(device_hours=1.0, energy_kwh=0.5, energy_sources=("data sheet",), cost=3.0, currency="EUR")],
        "c": [Usage(device_hours=0.5)],
        "old": [],
    }.items():
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        write_usage(run_folder(tmp_path / "runs" / name, steps=1), *usages)
    (tmp_path / "runs/recipe").mkdir()
    (tmp_path / "runs/recipe/recipe.yaml").write_text("name: no run\n")
    found = CliRunner().invoke(app, [str(tmp_path / "runs"), "--carbon", "400", "--json"])
    (usage,) = json.loads(found.stdout)["usage"]
    assert [Path(run["run"]).name for run in usage["runs"]] == ["a", "c", "b", "old"]
    assert [run["co2_kg"] for run in usage["runs"]] == pytest.approx([1.6, None, 0.2, None])
    assert usage["runs"][0]["device"] == "Some CPU"
    assert usage["total"] == {
        "runs": 4,
        "device_hours": 9.5,
        "energy_kwh": 4.5,
        "cost": {"USD": 16.0, "EUR": 3.0},
        "co2_kg": pytest.approx(1.8),
        "without_hours": 1,
        "without_energy": 2,
        "without_cost": 2,
    }
    printed = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(tmp_path / "runs")]).stdout
    assert re.search(r"4 runs +9\.5 +4\.5 +16 USD, 3 EUR", printed)
    assert "2 of 4 runs: energy is unknown, and not in the sum" in printed
    with pytest.raises(RunError, match=r"is not a run .*, and holds none"):
        sum_usage(tmp_path / "runs/recipe/none")


def test_the_load_of_experts_is_shaded_by_layer_over_the_steps(tmp_path):
    run = run_folder(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "Load of experts" not in write(run).read_text()
    for line in lines:
        if "loss" in line:
            line["expert_loads"] = [1.0 + 1 / line["step"], 1.5]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write(run).read_text()
    assert "2.00 in the worst layer at step 1, 1.50 at step 60 (layer 1)" in page
    drawn = page[page.index("Load of experts") :]
    assert (
        drawn[: drawn.index("</figure>")].count("fill-opacity") >= 70
    )  # cells in between the page and the full colour
