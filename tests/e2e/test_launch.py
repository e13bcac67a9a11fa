"""`launch` and `nettest` as a user types them."""

from __future__ import annotations

from .conftest import Command


def test_a_job_is_written_and_what_does_not_multiply_is_refused(preheat: Command) -> None:
    wide = ["launch", "r.yaml", "--scheduler", "slurm", "--gpus-per-node", "2", "--set", "techniques={fsdp: {}}"]
    out, _ = preheat.here(*wide, "--nodes", "2", "-o", "job.sbatch")
    assert "4 devices on 2 hosts, shard 4" in out
    assert "sbatch job.sbatch" in out
    text = (preheat.folder / "job.sbatch").read_text()
    lines = text.splitlines(keepends=True)
    assert lines[1].startswith("# written by preheat launch (")
    text = "".join([lines[0], *lines[2:]])
    assert preheat.here(*wide, "--nodes", "2")[0] == text  # to standard output
    made = preheat.here.json(*wide, "--nodes", "2")
    assert made["job"] == text
    assert (made["devices"], made["mesh"], made["submit"]) == (4, {"shard": 4}, None)

    out, error = preheat.here(
        "launch", "r.yaml", "--scheduler", "slurm", "--nodes", "2", "--gpus-per-node", "2", code=2
    )
    assert (out, error.count("\n")) == ("", 1)
    assert (
        "--nodes 2 x --gpus-per-node 2: a mesh that does not multiply: the recipe's techniques use 1 device, not 4; add data_parallel or fsdp for the others"
        in error
    )
    assert "cannot be written" in preheat.here(*wide, "-o", "no/such/folder", code=1)[1]


def test_a_job_without_data_says_what_it_trains_on(preheat: Command) -> None:
    job = ["launch", "bare.yaml", "--scheduler", "slurm", "--gpus-per-node", "1"]
    (preheat.folder / "bare.yaml").write_text("model: {preset: gpt2, path: gpt2}\nstop: {max_steps: 1}\n")
    out, error = preheat.here(*job)
    assert error.count("\n") == 1
    assert "bare.yaml: data.source is not stated, so the job trains on Python's standard library" in error
    assert "note:" not in out
    for stated in ("data.source=stdlib", "data={source: x.jsonl}"):
        assert "not stated" not in preheat.here(*job, "--set", stated)[1]


def test_help_has_an_example(preheat: Command) -> None:
    for command in ("launch", "nettest"):
        assert "Example" in preheat.here(command, "--help")[0]
