#!/usr/bin/env bash
# The step of action.yml: plans $FILE for $GPU, writes the outputs and the job's summary, and ends as the plan does
# (0: fits; 3: does not; 2: the file is wrong). Runs anywhere: GITHUB_* may be unset.
set -uo pipefail

# Options are separated by blanks, and may be none.
read -ra options <<<"${OPTIONS:-}"
plan=(preheat plan "$FILE" --gpu "$GPU" --count "${COUNT:-1}" --nodes "${NODES:-1}" "${options[@]}")
json=${RUNNER_TEMP:-$(mktemp -d)}/plan-$$.json

"${plan[@]}" --json >"$json"
status=$?
if [ "$status" -ne 0 ] && [ "$status" -ne 3 ]; then
  echo "::error file=$FILE::cannot be planned (exit code $status); its message is above"
  exit "$status"
fi

python - "$json" >>"${GITHUB_OUTPUT:-/dev/stdout}" <<'PYTHON'
import json
import sys

plan = json.load(open(sys.argv[1], encoding="utf-8"))
speed = plan["tokens_per_second"]
print(f"json={sys.argv[1]}")
print(f"verdict={plan['verdict']}")
print(f"peak-gib={plan['peak_gib']:.2f}")
print(f"tokens-per-second={'' if speed is None else round(speed)}")
PYTHON

# The plan is in the cache now: printing it takes a second.
text=$("${plan[@]}")
echo "$text"
{
  echo "### \`$FILE\` on $GPU"
  echo '```'
  echo "$text"
  echo '```'
} >>"${GITHUB_STEP_SUMMARY:-/dev/null}"

if [ "$status" -eq 3 ]; then
  echo "::error file=$FILE::does not fit $GPU; the plan above says what would"
  [ "${ALLOW_MISFIT:-false}" = true ] || exit 3
fi
