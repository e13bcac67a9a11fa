import pytest

from preheat.cli.views.console import Live
from preheat.cli.views.output import build_console


def test_speed_and_time_left_in_a_log_come_from_the_last_steps(capsys: pytest.CaptureFixture[str]) -> None:
    screen = build_console()
    with Live(screen, "demo", planned=True) as live:
        for step in range(1, 51):
            seconds = 4.0 if step == 1 else 0.1 if step % 2 else 0.3
            figures = {"step": step, "loss": 2.0, "memory": 2.0**27, "seconds": seconds}
            live.step(figures | {"tokens_per_second": 100 / seconds, "mfu": 0.02 / seconds}, 100)
    first, fiftieth = filter(None, capsys.readouterr().out.splitlines())
    assert first == "step 1/100  loss 2.000  warming up  128 MiB"
    # 50 steps of 0.2 s each; the mean of speeds, 667, would count the faster half of the time as much as the slower.
    assert fiftieth == "step 50/100  loss 2.000  500 tok/s  MFU 10%  128 MiB  10 s left"
