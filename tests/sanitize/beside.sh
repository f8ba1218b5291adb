# Sourced by .ci/run and tests/sanitize/run.sh: what runs side by side. What still runs when the script ends, ends.
running=()
# beside NAME COMMAND…: with others; its words are kept.
beside() {
  mkdir -p build
  "${@:2}" >"build/beside-$1.log" 2>&1 &
  running+=("$1 $!")
}
# Until all of them are through: prints each one's words in one piece, and fails where one did.
all_through() {
  local status=0 each
  for each in "${running[@]}"; do
    wait "${each#* }" || status=$?
    cat "build/beside-${each% *}.log"
  done
  running=()
  return $status
}
trap 'jobs=$(jobs -p); [ -z "$jobs" ] || kill $jobs 2>/dev/null || true' EXIT
