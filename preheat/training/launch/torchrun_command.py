"""Shell lines that the job scripts share: the torchrun command of each host, and the check if the run has finished.

The run's folder alone decides if a run begins, resumes (`train --auto-resume`) or has finished. The restart count
cannot be used: torchrun's differs between hosts.
"""

from __future__ import annotations

import shlex

from preheat import remote_code
from preheat.training.launch.job import Job

__all__ = ["END", "FINISHED", "HERE", "build_agent_command", "build_exports", "quoted", "build_recipe_lines"]

quoted = shlex.quote

FINISHED = """finished() {  # true if the last event in the run folder is "finished"
  grep -E '"kind": "(started|resumed|finished)"' "$run/events.jsonl" 2>/dev/null | tail -n 1 | grep -q '"finished"'
}"""

HERE = "PREHEAT_RECIPE"  # heredoc delimiter; no recipe contains it as a line, because recipes are YAML mappings

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
echo "the run was stopped before its end; it resumes when it is started again" >&2
exit 75"""


def build_exports(job: Job) -> list[str]:
    """Returns the lines that set the environment of a host's processes, after the user's setup lines."""
    # Cores per process, at least one; evaluated on the host if the number of cores is not given.
    cores = str(job.cpus_per_node) if job.cpus_per_node else "$(nproc)"
    threads = [
        f"cores={cores}",
        f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$((cores >= {job.processes} ? cores / {job.processes} : 1))}}"',
    ]
    # `set -u` comes after the setup lines: `module load` and `conda activate` read unset variables.
    return [
        "set -eo pipefail",
        *job.setup,
        "set -u",
        *(f"export {key}={quoted(value)}" for key, value in job.environment().items()),
        *threads,
    ]


def build_recipe_lines(text: str, variable: str) -> list[str]:
    """Returns the lines that write the recipe to the file named by a shell variable."""
    # Quoted delimiter: the shell expands nothing in the recipe.
    return [f"cat > \"${variable}\" <<'{HERE}'", *text.rstrip("\n").split("\n"), HERE]


def build_agent_command(job: Job, *, endpoint: str, first: str, identity: str, recipe: str, out: str) -> list[str]:
    """Returns the lines of the torchrun command of one host.

    Args:
        endpoint: host:port of the first host, as a shell expression.
        first: shell expression that is 1 on the first host, which holds the store, and 0 elsewhere; explicit, because a
            host's name may not resolve to itself.
        identity: rendezvous ID: the same on all hosts, different for each start of the job.
        recipe: the recipe's file.
        out: the run's folder.
    """
    return [
        "python -m torch.distributed.run \\",
        f"  --nnodes {job.nodes} --nproc-per-node {job.processes} --max-restarts {job.restarts} \\",
        f"  --rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id {identity} \\",
        f'  --rdzv-conf "is_host={first},join_timeout=900,read_timeout=300" \\',
        f"  -m preheat train {recipe} --out {out} "
        f"--auto-resume{f' {remote_code.OPTION}' if remote_code.is_allowed() else ''}",
    ]
