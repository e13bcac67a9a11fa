"""Lines of shell that the jobs share: torchrun as each host starts it, and what the run's folder says of where it stands.

Whether a run begins or goes on is decided by its folder alone (`train --auto-resume`); so is whether it has finished. The number of a
restart is no help: torchrun's own differs from host to host.
"""

from __future__ import annotations

import shlex

from preheat import remote_code
from preheat.training.launch.job import Job

__all__ = ["END", "FINISHED", "HERE", "agent", "exports", "quoted", "recipe_lines"]

quoted = shlex.quote

FINISHED = """finished() {  # the run's last word in its own folder
  grep -E '"kind": "(started|resumed|finished)"' "$run/events.jsonl" 2>/dev/null | tail -n 1 | grep -q '"finished"'
}"""

HERE = "PREHEAT_RECIPE"  # ends a recipe in a script; no recipe has a line of that name alone, since YAML would take it for text

END = """agent=$!
trap 'kill -TERM "$agent" 2>/dev/null' TERM INT  # once: torchrun tells its processes, which save and end
code=0
wait "$agent" || code=$?
while kill -0 "$agent" 2>/dev/null; do  # the wait ends with the signal, before the run does
  code=0
  wait "$agent" || code=$?
done
if finished; then exit 0; fi
if [ "$code" -ne 0 ]; then exit "$code"; fi
echo "the run was stopped before its end; it goes on when it is started again" >&2
exit 75"""


def exports(job: Job) -> list[str]:
    """The environment of the processes of a host, after the lines of set-up, which may bring their own."""
    cores = str(job.cpus_per_node) if job.cpus_per_node else "$(nproc)"
    threads = [
        f"cores={cores}",
        f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$((cores >= {job.processes} ? cores / {job.processes} : 1))}}"',
    ]
    # Lines such as `module load` and `conda activate` read variables that nobody has set.
    return [
        "set -eo pipefail",
        *job.setup,
        "set -u",
        *(f"export {key}={quoted(value)}" for key, value in job.environment().items()),
        *threads,
    ]


def recipe_lines(text: str, variable: str) -> list[str]:
    """Writes the recipe to the file that a variable names: the job carries all that it needs."""
    return [f"cat > \"${variable}\" <<'{HERE}'", *text.rstrip("\n").split("\n"), HERE]


def agent(job: Job, *, endpoint: str, first: str, identity: str, recipe: str, out: str) -> list[str]:
    """torchrun on one host.

    Args:
        endpoint: host:port of the first host, as the shell finds it.
        first: is 1 on the first host and 0 elsewhere: it holds the store. Told, since host names may not resolve to themselves.
        identity: the same on all hosts, another for each start of the job.
        recipe: the recipe's file.
        out: the run's folder.
    """
    return [
        "python -m torch.distributed.run \\",
        f"  --nnodes {job.nodes} --nproc-per-node {job.processes} --max-restarts {job.restarts} \\",
        f"  --rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id {identity} \\",
        f'  --rdzv-conf "is_host={first},join_timeout=900,read_timeout=300" \\',
        f"  -m preheat train {recipe} --out {out} "
        f"--auto-resume{f' {remote_code.OPTION}' if remote_code.allowed() else ''}",
    ]
